"""Which variant is recommended, and what is said of losses."""

from dataclasses import replace

import pytest

from fsdpctl.tools.compare.judge import as_fast_as_the_fastest, losses, odd_losses, recommend
from fsdpctl.tools.compare.row import NOT_REACHED, Row
from tests.tools.compare.rows import failed, measured, of


def foreseen(name: str, low: float, speed: float, high: float) -> Row:
    spread = low, high
    return Row({"strategy": name}, name, tokens_per_second=speed, tokens_per_second_spread=spread)


@pytest.mark.parametrize(
    ("rows", "fastest"),
    [
        ([foreseen("a", 9, 10, 11), foreseen("b", 14, 15, 16)], ["b"]),
        ([foreseen("a", 9, 10, 15), foreseen("b", 14, 15, 16)], ["b", "a"]),
        ([foreseen("a", 9, 10, 11), failed("c")], ["a"]),
        ([failed("c")], []),
    ],
)
def test_what_lies_within_the_spread_is_as_fast_as_the_fastest(rows, fastest):
    assert [row.strategy for row in as_fast_as_the_fastest(rows)] == fastest


def test_the_fastest_is_recommended_with_its_reason_and_the_runner_up():
    slow = measured("slow", 800, 810, 805)
    rounds = (
        replace(
            each,
            compute_seconds=0.55 * each.step_seconds,
            exposed_communication_seconds=0.35 * each.step_seconds,
        )
        for each in slow.rounds
    )
    slow = replace(slow, rounds=tuple(rounds))
    said = recommend(of(slow, failed("broken"), measured("fast", 1000, 1005, 1010)))
    assert said.best is not None
    assert said.best.strategy == "fast"
    assert "fastest, by more than the spread" in said.text
    assert "waits for communication" in said.text
    assert "Runner-up: strategy=slow" in said.text
    assert "slower" in said.text


def test_of_a_tie_the_one_with_less_memory_is_recommended():
    fast = measured("fast", 1000, 980, 1020, memory=80)
    lean = measured("lean", 990, 1000, 985, memory=40)
    said = recommend(of(fast, lean))
    assert said.best is not None
    assert said.best.strategy == "lean"
    assert "a tie with strategy=fast" in said.text
    assert "none of them takes much less memory" in said.text
    alike = recommend(of(fast, replace(lean, estimated_peak_tensor_bytes=80 << 20)))
    assert alike.best is not None
    assert alike.best.strategy == as_fast_as_the_fastest(of(fast, lean))[0].strategy
    assert "it was the fastest" in alike.text


def test_memory_that_is_not_known_decides_nothing():
    unknown = Row({"strategy": "x"}, "x", tokens_per_second=10.0)
    known = replace(unknown, strategy="y", peak_allocated_bytes=5)
    assert recommend([unknown, known]).best is unknown


def test_nothing_is_recommended_where_nothing_ran():
    assert recommend([failed("a"), failed("b")]).best is None
    stopped = replace(of(measured("a", 10))[0], status=NOT_REACHED)
    assert recommend([stopped]).best is None


def with_losses(**ends: float) -> list[Row]:
    return of(*(measured(name, 10, 10, final_loss=end) for name, end in ends.items()))


def test_equal_losses_are_said_to_be_equal():
    assert list(losses(with_losses(a=2.5, b=2.5))) == ["all losses are equal"]
    assert list(losses(with_losses(a=2.5))) == []


def test_it_is_said_which_loss_is_another_and_whether_by_rounding():
    rows = with_losses(a=2.5, b=2.5, c=2.5000001, d=2.6)
    rounded, wrong = losses(rows)
    assert rounded.startswith("strategy=c: its loss differs by rounding")
    assert wrong.startswith("strategy=d: its loss differs by more than that, +0.1")
    assert [row.strategy for row in odd_losses(rows)] == ["d"]
    (fast,) = of(measured("e", 90, 90, final_loss=3.5))
    assert "has to be understood" in recommend([*rows, fast]).text


def test_losses_of_what_trains_something_else_are_not_compared():
    a, b = with_losses(a=2.5, b=2.6)
    rows = [
        replace(a, varied={"optimizer.lr": "1e-3"}),
        replace(b, varied={"optimizer.lr": "1e-4"}),
    ]
    assert list(losses(rows)) == ["all losses are equal where the same is trained"]
    assert "optimizer.lr" in recommend(rows).text


def test_rounds_that_end_at_different_losses_are_told():
    (row,) = of(measured("a", 10, 11))
    first, second = row.rounds
    (said, *_) = losses([replace(row, rounds=(first, replace(second, final_loss=2.75)))])
    assert "its rounds ended at different losses" in said
    assert "2.75" in said
