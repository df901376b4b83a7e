"""Summaries of rounds."""

from statistics import median

import pytest

from fsdpctl.tools.compare.measure import in_turn
from tests.tools.compare.rows import measured, of


def test_a_slow_round_of_the_machine_does_not_widen_a_variants_spread():
    rows = of(*(measured(f"s{speed}", speed, speed / 2, speed * 2) for speed in (100, 110, 120)))
    for row, speed in zip(rows, (100, 110, 120), strict=True):
        assert row.tokens_per_second == pytest.approx(speed)
        assert row.tokens_per_second_spread == pytest.approx((speed, speed))
        assert [each.drift for each in row.rounds] == pytest.approx([1, 0.5, 2])
        assert row.step_seconds == pytest.approx(1000 / speed)


def test_every_value_is_derived_from_the_rounds():
    row, _ = of(measured("a", 100, 90, 107), measured("b", 80, 85, 79))
    assert row.tokens_per_second == median(e.tokens_per_second / e.drift for e in row.rounds)
    assert row.step_seconds == median(e.step_seconds * e.drift for e in row.rounds)
    low, high = row.tokens_per_second_spread or (0.0, 0.0)
    assert low < row.speed < high


def test_the_parts_of_a_step_add_up_to_it():
    (row,) = of(measured("a", 100, 90, 107))
    parts = (
        row.compute_seconds,
        row.exposed_communication_seconds,
        row.optimizer_seconds,
        row.data_seconds,
    )
    assert sum(each or 0 for each in parts) == pytest.approx(row.step_seconds)


def test_a_single_variant_keeps_its_spread():
    (row,) = of(measured("a", 100, 90, 107))
    assert row.tokens_per_second == 100
    assert row.tokens_per_second_spread == (90, 107)
    (once,) = of(measured("a", 100))
    assert once.tokens_per_second_spread == pytest.approx((90, 110))


def test_incomplete_rounds_are_used():
    first, second, third = of(measured("a", 100, 50), measured("b", 200, 100), measured("c", 150))
    assert first.tokens_per_second == pytest.approx(100)
    assert second.tokens_per_second == pytest.approx(200)
    assert third.tokens_per_second == pytest.approx(150)


@pytest.mark.parametrize(("count", "rounds"), [(3, 3), (7, 3), (2, 3), (1, 4), (6, 2)])
def test_every_round_has_all_variants_and_begins_with_a_different_one(count, rounds):
    orders = [in_turn(range(count), number, rounds) for number in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len({order[0] for order in orders}) == min(count, rounds)
