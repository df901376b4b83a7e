"""Reports on made-up variants: order, table, JSON and chart."""

import json
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.image import imread

from fsdpctl.commands.compare.report import (
    COLUMNS,
    FAILED,
    NOT_REACHED,
    VariantResult,
    cells,
    loss_lines,
    sorted_rows,
    varied_names,
    write_report,
)
from fsdpctl.estimate.accuracy import ErrorBand

MIB = 1 << 20


def measured(name: str, speed: float, memory: float = 50, **kwargs: Any) -> VariantResult:
    """Return a variant that ran at `speed` tokens per second with 1,000 tokens per step."""
    return VariantResult(
        {"strategy": name}, name, world_size=2, tokens_per_second=speed, step_seconds=1000 / speed,
        estimated_peak_tensor_bytes=int(memory * MIB), memory_bytes=100 * MIB, **kwargs,
    )  # fmt: skip


def failed(name: str) -> VariantResult:
    return replace(VariantResult({"strategy": name}, name), status=f"{FAILED}<rank 1> was killed")


def sized(name: str, ranks: int, hours: float) -> VariantResult:
    figures: dict[str, Any] = {
        "hours": hours, "gpu_hours": ranks * hours, "cost": ranks * hours / 2,
    }  # fmt: skip
    return VariantResult(
        {"strategy": name}, name, world_size=ranks, tokens_per_second=1000 / hours,
        error_band=ErrorBand("dense", 0.9, 1.1, 50), estimated_peak_tensor_bytes=ranks, **figures,
    )  # fmt: skip


SIZED = [sized("a", 8, 80), sized("b", 16, 44), sized("c", 32, 19)]


@pytest.mark.parametrize(("rows", "by", "expected"), [
    ([measured("a", 10), measured("b", 15)], "time", "ba"),
    ([failed("c"), measured("a", 10)], "time", "ac"),
    ([replace(measured("a", 10), status=NOT_REACHED), failed("b")], "time", "ab"),
    ([measured("a", 1000, 80), measured("b", 990, 60)], "time", "ab"),
    ([measured("a", 1000, 80), measured("b", 990, 60)], "memory", "ba"),
    (SIZED, "time", "cba"), (SIZED, "gpu-hours", "cab"), (SIZED, "cost", "cab"),
    (SIZED, "memory", "abc"),
])  # fmt: skip
def test_the_order_is_that_of_the_number_that_by_names(rows, by, expected):
    assert "".join(row.strategy for row in sorted_rows(rows, by)) == expected


def with_losses(**ends: float) -> list[VariantResult]:
    return [measured(name, 10, final_loss=end) for name, end in ends.items()]


def test_equal_losses_are_reported_as_equal():
    assert list(loss_lines(with_losses(a=2.5, b=2.5))) == ["all losses are equal"]
    assert list(loss_lines(with_losses(a=2.5))) == []


def test_different_losses_are_named_with_whether_rounding_explains_them():
    rounded, wrong = loss_lines(with_losses(a=2.5, b=2.5, c=2.5000001, d=2.6))
    assert rounded.startswith("strategy=c: loss differs by rounding")
    assert wrong.startswith("strategy=d: loss differs by more than rounding, +0.1")


def test_losses_of_variants_that_train_differently_are_not_compared():
    a, b = with_losses(a=2.5, b=2.6)
    rows = [
        replace(a, varied={"optimizer.lr": "1e-3"}), replace(b, varied={"optimizer.lr": "1e-4"}),
    ]  # fmt: skip
    (message,) = loss_lines(rows)
    assert message == "all losses are equal among variants with the same training settings"


ROWS = [measured("full_shard", 1000), measured("no_shard", 1200, 70), failed("hybrid_shard")]


@pytest.mark.parametrize(("rows", "by"), [(sorted_rows(ROWS), "time"), (SIZED, "cost")])
def test_the_files_are_the_rows_and_a_picture_of_those_that_ran(rows, by, tmp_path):
    written = write_report(rows, "llama_tiny, measured on <some> CPU", tmp_path, by)
    assert {each.name for each in written} == {each.name for each in tmp_path.iterdir()}
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert [row["status"] for row in saved] == [row.status for row in rows]
    picture = imread(tmp_path / "compare.png")
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05


def test_nothing_is_drawn_without_values(tmp_path):
    write_report([failed("a")], "a title", tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["compare.json"]


def test_values_that_are_not_known_are_dashes():
    mfu = [*COLUMNS].index("MFU")
    assert {cells(row, [])[mfu] for row in ROWS} == {"-"}
    assert cells(replace(ROWS[0], mfu=0.4321), [])[mfu] == "43.2%"


def test_the_first_column_is_the_engine_if_engines_vary():
    assert varied_names(ROWS) == ("strategy",)
    rows = [replace(r, varied={"engine": "ddp", **r.varied}, engine="ddp") for r in ROWS]
    assert varied_names(rows) == ("engine", "strategy")
    assert cells(rows[1], varied_names(rows))[:2] == ["ddp", "no_shard"]
