"""`fsdpctl compare`: what is varied, and what comes out."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fsdpctl.compare.measure import Row, as_fast_as_the_fastest
from fsdpctl.compare.vary import variants
from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES
from tests.cli.run import TINY, fsdpctl, invoke, make_text


def labels(*words: str) -> list[str]:
    return [each.label for each in variants(list(words), None, None, steps=4)]


def test_commas_separate_alternatives_of_choices_and_numbers():
    assert labels("strategy=full_shard,no_shard", "train.micro_batch_size=1,2") == [
        "strategy=full_shard train.micro_batch_size=1",
        "strategy=full_shard train.micro_batch_size=2",
        "strategy=no_shard train.micro_batch_size=1",
        "strategy=no_shard train.micro_batch_size=2",
    ]


def test_commas_in_paths_are_commas():
    (only,) = variants(["strategy=no_shard", "data.path=a,b"], None, None, steps=4)
    assert only.composed.config.data.path == "a,b"


def test_without_alternatives_all_strategies_are_compared():
    assert labels() == [f"strategy={name}" for name in STRATEGIES]
    assert labels("strategy=no_shard") == [""]


def test_values_are_left_out_under_strategies_that_have_no_use_for_them():
    found = variants(["strategy.owner_map=balanced"], None, None, steps=4)
    maps = {each.composed.config.strategy.name: each.composed.config.strategy for each in found}
    assert maps["shard_optimizer"].owner_map == "balanced"
    assert maps["full_shard"].owner_map == "even"


def test_alternatives_given_twice_are_one():
    assert labels("strategy=no_shard,no_shard") == ["strategy=no_shard"]


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("strategy=full_shard,no_shrad", "did you mean no_shard?"),
        ("strategy=full_shard,", "is empty"),
        ("train.micro_batch_size=1,x", "train.micro_batch_size=x"),
        ("train.steps=5,6", "--steps"),
        ("train.run_dir=here", "compare decides it"),
        ("strateg=a,b", "did you mean strategy?"),
    ],
)
def test_mistakes_are_answered_before_anything_runs(word, part):
    with pytest.raises(UsageError) as caught:
        labels(word)
    assert part in str(caught.value)


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, said = invoke("compare", "--out", str(tmp_path))
    assert code == 2
    assert "not an empty directory" in said


@pytest.mark.parametrize("steps", ["3", "x", "0", "1e9"])
def test_a_length_that_is_not_allowed_is_answered(steps):
    code, said = invoke("compare", "--steps", steps)
    assert code == 2
    assert "--steps" in said
    assert "from 4" in said


def test_what_no_variant_can_do_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = invoke("compare", "data=text", "data.path=/no/such", "--steps", "4")
    assert code == 2
    assert "no such file" in said
    assert f"{len(STRATEGIES) - 1} more variants" in said


def rows(folder: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
    result = fsdpctl(
        "compare", *TINY, f"data.path={make_text(folder)}", *words, "--json", cwd=folder
    )
    assert result.returncode == code, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def row_of(name: str, low: float, speed: float, high: float) -> Row:
    return Row(
        {"strategy": name}, name, tokens_per_second=speed, tokens_per_second_spread=(low, high)
    )


@pytest.mark.parametrize(
    ("rows", "fastest"),
    [
        ([row_of("a", 9, 10, 11), row_of("b", 14, 15, 16)], ["b"]),
        ([row_of("a", 9, 10, 15), row_of("b", 14, 15, 16)], ["b", "a"]),
        ([row_of("a", 9, 10, 11), Row({"strategy": "c"}, "c", status="failed: x")], ["a"]),
        ([Row({"strategy": "c"}, "c", status="failed: x")], []),
    ],
)
def test_what_lies_within_the_spread_is_as_fast_as_the_fastest(rows, fastest):
    assert [row.strategy for row in as_fast_as_the_fastest(rows)] == fastest


@pytest.mark.slow
def test_all_strategies_have_equal_losses_and_the_estimated_bytes(tmp_path):
    before = set(Path(tempfile.gettempdir()).glob("fsdpctl-*"))
    found = rows(tmp_path, "--steps", "6", "--out", "kept")
    assert [row["strategy"] for row in found] == list(STRATEGIES)
    assert len({row["final_loss"] for row in found}) == 1
    for row in found:
        assert row["status"] == "ok"
        assert row["peak_allocated_bytes"] == row["estimated_peak_allocated_bytes"]
        low, high = row["tokens_per_second_spread"]
        assert low <= row["tokens_per_second"] <= high
    assert json.loads((tmp_path / "kept" / "compare.json").read_text()) == found
    assert set(Path(tempfile.gettempdir()).glob("fsdpctl-*")) == before


@pytest.mark.slow
def test_one_that_cannot_run_does_not_keep_the_others_from_running(tmp_path):
    words = ["strategy=hybrid_shard", "strategy.dp_shard_size=3,2", "--steps", "4"]
    refused, ran = rows(tmp_path, *words, code=1)
    assert "must divide the 2 ranks" in str(refused["status"])
    assert refused["tokens_per_second"] is None
    assert ran["status"] == "ok"


@pytest.mark.slow
def test_recomputation_and_compilation_change_neither_losses_nor_engine_bytes(tmp_path):
    words = ["activation_checkpointing=none,full,selective", "--steps", "6"]
    plain, *others = rows(tmp_path, "strategy=full_shard", *words)
    for row in others:
        assert row["final_loss"] == plain["final_loss"]
        assert row["peak_allocated_bytes"] == plain["peak_allocated_bytes"]
    (compiled,) = rows(tmp_path, "strategy=full_shard", "train.compile=true", "--steps", "6")
    assert compiled["final_loss"] == pytest.approx(plain["final_loss"], abs=1e-4)


@pytest.mark.slow
def test_bf16_follows_fp32_on_the_default_model(tmp_path):
    """Within 0.02 nats at each of 20 steps."""
    losses = {}
    for precision in ("fp32", "bf16"):
        words = [f"precision={precision}", "train.steps=20", "train.sample_tokens=0"]
        result = fsdpctl("train", *words, f"train.run_dir={precision}", cwd=tmp_path, timeout=300)
        assert result.returncode == 0, result.stderr
        lines = map(json.loads, (tmp_path / precision / "metrics.jsonl").read_text().splitlines())
        losses[precision] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["fp32"]) == 20
    for full, half in zip(losses["fp32"], losses["bf16"], strict=True):
        assert half == pytest.approx(full, abs=0.02)
