"""Summaries of rounds."""

import pytest

from fsdpctl.commands.compare.measure import in_turn
from tests.commands.compare.rows import measured, of


def test_the_parts_of_a_step_add_up_to_it():
    (row,) = of(measured("a", 100, 90, 107))
    parts = (
        row.compute_seconds, row.exposed_communication_seconds, row.optimizer_seconds,
        row.data_seconds,
    )  # fmt: skip
    assert sum(each or 0 for each in parts) == pytest.approx(row.step_seconds)


def test_the_speed_is_the_median_and_the_spread_that_of_rounds_or_steps():
    (row,) = of(measured("a", 100, 90, 107))
    assert row.tokens_per_second == 100
    assert row.tokens_per_second_spread == (90, 107)
    (once,) = of(measured("a", 100))
    assert once.tokens_per_second_spread == pytest.approx((90, 110))


@pytest.mark.parametrize(("count", "rounds"), [(3, 3), (7, 3), (2, 3), (1, 4), (6, 2)])
def test_every_round_has_all_variants_and_begins_with_a_different_one(count, rounds):
    orders = [in_turn(range(count), number, rounds) for number in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len({order[0] for order in orders}) == min(count, rounds)
