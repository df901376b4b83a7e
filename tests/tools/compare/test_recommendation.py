"""The recommended variant, and the comparison of losses."""

from dataclasses import replace

import pytest

from fsdpctl.estimate.accuracy import Band
from fsdpctl.tools.compare.recommendation import (
    as_fast_as_the_fastest,
    losses,
    odd_losses,
    recommend,
)
from fsdpctl.tools.compare.row import NOT_REACHED, Row
from tests.tools.compare.rows import failed, measured, of


def predicted(name: str, low: float, speed: float, high: float) -> Row:
    spread = low, high
    return Row({"strategy": name}, name, tokens_per_second=speed, tokens_per_second_spread=spread)


@pytest.mark.parametrize(
    ("rows", "fastest"),
    [
        ([predicted("a", 9, 10, 11), predicted("b", 14, 15, 16)], ["b"]),
        ([predicted("a", 9, 10, 15), predicted("b", 14, 15, 16)], ["b", "a"]),
        ([predicted("a", 9, 10, 11), failed("c")], ["a"]),
        ([failed("c")], []),
    ],
)
def test_rows_whose_spreads_overlap_are_as_fast_as_the_fastest(rows, fastest):
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
    assert "exposed communication takes" in said.text
    assert "Runner-up: strategy=slow" in said.text
    assert "slower" in said.text


def test_variants_of_another_kind_may_be_as_fast_by_their_error_bands():
    dense, offloaded = Band("dense", 0.9, 1.1, 30), Band("offloaded", 0.5, 2.0, 0)
    fast = replace(predicted("fast", 98, 100, 102), error_band=dense)
    other = replace(predicted("other", 49, 50, 51), error_band=offloaded)
    said = recommend([fast, other])
    assert said.best is fast
    assert "By the error bands, strategy=other may be as fast (offloaded steps: unt" in said.text
    slow = replace(predicted("other", 39, 40, 41), error_band=offloaded)
    assert "error bands" not in recommend([fast, slow]).text
    assert "error bands" not in recommend([fast, replace(other, error_band=dense)]).text


def test_among_tied_variants_the_one_with_less_memory_is_recommended():
    fast = measured("fast", 1000, 980, 1020, memory=80)
    lean = measured("lean", 990, 1000, 985, memory=40)
    said = recommend(of(fast, lean))
    assert said.best is not None
    assert said.best.strategy == "lean"
    assert "tied with strategy=fast" in said.text
    assert "None of them needs much less memory" in said.text
    alike = recommend(of(fast, replace(lean, estimated_peak_tensor_bytes=80 << 20)))
    assert alike.best is not None
    assert alike.best.strategy == as_fast_as_the_fastest(of(fast, lean))[0].strategy
    assert "it was the fastest" in alike.text


def test_unknown_memory_does_not_decide_a_tie():
    unknown = Row({"strategy": "x"}, "x", tokens_per_second=10.0)
    known = replace(unknown, strategy="y", peak_engine_bytes=5)
    assert recommend([unknown, known]).best is unknown


def test_nothing_is_recommended_if_nothing_ran():
    assert recommend([failed("a"), failed("b")]).best is None
    stopped = replace(of(measured("a", 10))[0], status=NOT_REACHED)
    assert recommend([stopped]).best is None


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
    assert [row.strategy for row in odd_losses(rows)] == ["d"]
    (fast,) = of(measured("e", 90, 90, final_loss=3.5))
    assert "find out why first" in recommend([*rows, fast]).text


def test_losses_of_variants_that_train_differently_are_not_compared():
    a, b = with_losses(a=2.5, b=2.6)
    rows = [
        replace(a, varied={"optimizer.lr": "1e-3"}),
        replace(b, varied={"optimizer.lr": "1e-4"}),
    ]
    assert list(losses(rows)) == [
        "all losses are equal among variants with the same training settings"
    ]
    assert "optimizer.lr" in recommend(rows).text


def test_rounds_with_different_final_losses_are_reported():
    (row,) = of(measured("a", 10, 11))
    first, second = row.rounds
    (said, *_) = losses([replace(row, rounds=(first, replace(second, final_loss=2.75)))])
    assert "final losses of its rounds differ" in said
    assert "2.75" in said
