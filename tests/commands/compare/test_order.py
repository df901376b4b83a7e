"""The order of variants, and the comparison of losses."""

from dataclasses import replace

import pytest

from fsdpctl.commands.compare.order import losses, ordered
from fsdpctl.commands.compare.row import NOT_REACHED, Row
from tests.commands.compare.rows import failed, measured, of


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
