"""Made-up variants: their summaries, their order, and the table, JSON and page of them."""

import base64
import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from matplotlib.image import imread

from fsdpctl.commands.compare.measure import in_turn, summarized
from fsdpctl.commands.compare.report import (
    ComparisonInfo,
    losses,
    ordered,
    recommendation,
    write_report,
)
from fsdpctl.commands.compare.row import FAILED, NOT_REACHED, Round, Row, columns
from fsdpctl.estimate.accuracy import Band

MIB = 1 << 20
ABOUT = ComparisonInfo(
    "measured", "llama_tiny, 16 tokens per sample, measured on 2 ranks of <some> CPU",
    "3 rounds of 8 steps per variant", "fsdpctl compare strategy=a,b", "2026-01-01",
)  # fmt: skip


def round_at(speed: float, **about: Any) -> Round:
    """Return the summary of a run at `speed` tokens per second with 1,000 tokens per step."""
    seconds = 1000 / speed
    figures: dict[str, Any] = {
        "run_dir": None, "tokens_per_second": speed, "step_seconds": seconds,
        "exposed_communication_seconds": 0.2 * seconds, "mfu": None,
        "peak_engine_bytes": 9 * MIB, "peak_tensor_bytes": None, "peak_reserved_bytes": None,
        "final_loss": 2.5,
    }  # fmt: skip
    return Round(**{**figures, **about})


def measured(name: str, *speeds: float, memory: float = 50, **about: Any) -> Row:
    """Return a variant that ran at these speeds, before it is summarized."""
    rounds = tuple(
        round_at(speed, run_dir=f"runs/{name}/round-{at + 1}", **about)
        for at, speed in enumerate(speeds)
    )
    return Row(
        {"strategy": name}, name, world_size=2, sent_bytes_per_step=3 * MIB, rounds=rounds,
        estimated_peak_engine_bytes=9 * MIB, estimated_peak_tensor_bytes=int(memory * MIB),
        memory_bytes=100 * MIB,
    )  # fmt: skip


def failed(name: str) -> Row:
    return replace(Row({"strategy": name}, name), status=f"{FAILED}<rank 1> was killed")


def of(*rows: Row) -> list[Row]:
    """Return the rows with their summaries."""
    return [summarized(row) for row in rows]


def test_the_exposed_part_of_a_step_has_its_share_in_all_rounds():
    (row,) = of(measured("a", 100, 90, 107))
    assert row.exposed_communication_seconds == pytest.approx(0.2 * (row.step_seconds or 0))


def test_the_speed_is_the_median_and_the_spread_that_of_rounds():
    (row,) = of(measured("a", 100, 90, 107))
    assert row.tokens_per_second == 100
    assert row.tokens_per_second_spread == (90, 107)
    (once,) = of(measured("a", 100))
    assert once.tokens_per_second_spread is None


@pytest.mark.parametrize(("count", "rounds"), [(3, 3), (7, 3), (2, 3), (1, 4), (6, 2)])
def test_every_round_has_all_variants_and_begins_with_a_different_one(count, rounds):
    orders = [in_turn(range(count), number, rounds) for number in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len({order[0] for order in orders}) == min(count, rounds)


def predicted(name: str, low: float, speed: float, high: float, ranks: int | None = None) -> Row:
    spread = low, high
    return Row(
        {"strategy": name}, name, tokens_per_second=speed, tokens_per_second_spread=spread,
        world_size=ranks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([predicted("a", 9, 10, 11), predicted("b", 14, 15, 16)], "ba"),
        ([failed("c"), predicted("a", 9, 10, 11)], "ac"),
        ([replace(of(measured("a", 10))[0], status=NOT_REACHED), failed("b")], "ab"),
        # Tied: fewer ranks, then less memory, then the faster one; others by speed.
        ([predicted("a", 9, 10, 15), predicted("b", 14, 15, 16)], "ba"),
        ([predicted("a", 9, 10, 15, ranks=2), predicted("b", 14, 15, 16, ranks=4)], "ab"),
        (of(measured("a", 1000, 980, 1020, memory=80), measured("b", 990, 1000, 985)), "ba"),
        ([Row({"strategy": name}, name, tokens_per_second=10.0) for name in "ab"], "ab"),
        ([predicted("a", 7, 8, 11), predicted("b", 10, 11, 14), predicted("c", 13, 15, 16)], "cba"),
        (of(measured("a", 90, 99), measured("b", 97, 98, memory=60), measured("c", 50)), "abc"),
    ],
)
def test_the_fastest_is_first_and_ties_are_decided_by_ranks_then_memory(rows, expected):
    assert [row.strategy for row in ordered(rows)] == list(expected)


def sized(name: str, ranks: int, hours: float) -> Row:
    band = Band("dense", 0.9, 1.1, 50)
    figures: dict[str, Any] = {
        "hours": hours,
        "gpu_hours": ranks * hours,
        "cost": ranks * hours / 2,
    }
    return Row(
        {"strategy": name}, name, world_size=ranks, tokens_per_second=1000 / hours,
        error_band=band, estimated_peak_tensor_bytes=ranks, **figures,
    )  # fmt: skip


@pytest.mark.parametrize(("by", "expected"), [
    ("time", "cba"), ("gpu-hours", "acb"), ("cost", "acb"), ("memory", "abc"),
])  # fmt: skip
def test_the_smaller_cluster_is_recommended_within_the_error_band(by, expected):
    rows = ordered([sized("a", 8, 80), sized("b", 16, 44), sized("c", 32, 19)], by)
    assert "".join(row.strategy for row in rows) == expected
    said = "strategy=a, which has fewer ranks; strategy=c is tied by"
    assert list(recommendation(rows, by)) == (
        [f"recommended: {said} {by}"] if expected == "acb" else []
    )


def with_losses(**ends: float) -> list[Row]:
    return of(*(measured(name, 10, 10, final_loss=end) for name, end in ends.items()))


def test_equal_losses_are_reported_as_equal():
    assert list(losses(with_losses(a=2.5, b=2.5))) == ["all losses are equal"]
    assert list(losses(with_losses(a=2.5))) == []


def test_different_losses_are_named_with_whether_rounding_explains_them():
    rows = with_losses(a=2.5, b=2.5, c=2.5000001, d=2.6)
    rounded, wrong = losses(rows)
    assert rounded.startswith("strategy=c: loss differs by rounding")
    assert wrong.startswith("strategy=d: loss differs by more than rounding, +0.1")


def test_losses_of_variants_that_train_differently_are_not_compared():
    a, b = with_losses(a=2.5, b=2.6)
    rows = [
        replace(a, varied={"optimizer.lr": "1e-3"}),
        replace(b, varied={"optimizer.lr": "1e-4"}),
    ]
    assert list(losses(rows)) == [
        "all losses are equal among variants with the same training settings"
    ]


def test_rounds_with_different_final_losses_are_reported():
    (row,) = of(measured("a", 10, 11))
    first, second = row.rounds
    (said, *_) = losses([replace(row, rounds=(first, replace(second, final_loss=2.75)))])
    assert "final losses of its rounds differ" in said
    assert "2.75" in said


ROWS = of(
    measured("full_shard", 1000, 1010, 990),
    measured("no_shard", 1200, 1190, 1215, memory=70),
    failed("hybrid_shard"),
)
ORDERED = ordered(ROWS)
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """What a page has in it; fails where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(ORDERED, ABOUT, folder)
    return folder


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(folder):
    page = Page((folder / "compare.html").read_text())
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "base", "form"}
    for tag, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        if tag == "img":
            assert str(attrs["src"]).startswith("data:image/png;base64,")
            assert attrs["alt"]
    assert "://" not in (folder / "compare.html").read_text()


def test_the_page_begins_with_the_best_variant(folder):
    text = Page((folder / "compare.html").read_text()).text
    wanted = [
        ABOUT.title, "The first variant is recommended", "no_shard", "full_shard", "hybrid_shard",
        "<rank 1> was killed", "all losses are equal", "How the values were measured",
        ABOUT.command,
    ]  # fmt: skip
    places = [text.find(each) for each in wanted]
    assert -1 not in places
    assert places == sorted(places)


def test_the_picture_is_not_empty(folder):
    (source,) = (
        a["src"] for tag, a in Page((folder / "compare.html").read_text()).tags if tag == "img"
    )
    picture = imread(io.BytesIO(base64.b64decode(str(source).partition(",")[2])))
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05


def test_json_has_the_rows(folder):
    rows = json.loads((folder / "compare.json").read_text())
    assert [row["status"] for row in rows] == [row.status for row in ORDERED]
    assert rows[1]["rounds"][2]["run_dir"] == "runs/full_shard/round-3"
    assert {each.name for each in folder.iterdir()} == {"compare.json", "compare.html"}


def test_nothing_is_drawn_without_values(tmp_path):
    write_report([failed("a")], replace(ABOUT, is_complete=False), tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert "<img" not in page
    assert "Incomplete:" in page


def test_predicted_variants_have_the_same_report(tmp_path):
    predicted = [
        Row({"strategy": name}, name, tokens_per_second=speed, step_seconds=1.0)
        for name, speed in (("a", 10.0), ("b", 20.0))
    ]
    write_report(predicted, replace(ABOUT, what="predicted", title="predicted on 8 H100"), tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert "predicted on 8 H100" in page
    assert "How the values were predicted" in page


def test_columns_without_values_are_omitted():
    titles = [column.title for column in columns(ROWS)]
    assert "MFU" not in titles
    assert titles[0] == "strategy"
    with_mfu = [replace(row, mfu=0.4321) for row in ROWS]
    assert "43.2%" in next(c for c in columns(with_mfu) if c.title == "MFU").cells


def test_the_first_column_is_the_engine_if_engines_vary():
    rows = [replace(r, varied={"engine": "ddp", **r.varied}, engine="ddp") for r in ROWS]
    assert columns(rows)[0].title == "engine"
