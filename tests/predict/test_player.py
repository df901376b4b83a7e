"""What goes on at the same time, worked out by hand."""

import pytest

from fsdpctl.predict.player import COMPUTE, Played, Player
from fsdpctl.predict.tasks import Compute, Start, Task, Transfer, Wait


def played(*tasks: Task) -> Played:
    return Player().play(tasks)


def start(
    key: int, seconds: float, *, queue: str = "a", after: int | None = None, **about
) -> Start:
    link = about.pop("link", "wire")
    transfer = Transfer(link, about.pop("latency", 0.0), seconds, **about)
    return Start(key, queue, transfer, f"transfer {key}", after)


def test_computing_hides_what_is_sent_beside_it():
    found = played(start(1, 2.0), Compute(3.0, "x"), Wait(1))
    assert (found.seconds, found.waiting) == (3.0, 0.0)
    found = played(start(1, 5.0), Compute(3.0, "x"), Wait(1))
    assert (found.seconds, found.waiting) == (5.0, 2.0)


def test_sending_takes_arithmetic_from_what_is_computed_beside_it():
    found = played(start(1, 2.0, slows=0.25), Compute(3.0, "x"), Wait(1))
    # 1.5 seconds' worth are done in 2, and 1.5 more follow.
    assert found.seconds == pytest.approx(3.5)
    assert found.computing["compute"] == pytest.approx(3.5)


def test_computing_takes_speed_from_what_is_sent_beside_it():
    found = played(start(1, 2.0, yields=0.5), Compute(1.0, "x"), Wait(1))
    assert found.seconds == pytest.approx(2.5)  # half a second's worth in the first
    assert found.waiting == pytest.approx(1.5)


def test_one_queue_is_worked_off_in_its_order():
    found = played(start(1, 1.0), start(2, 1.0), Wait(2))
    assert found.seconds == pytest.approx(2.0)
    assert [each.label for each in found.stretches] == ["transfer 1", "transfer 2"]


def test_two_queues_share_a_link_and_have_two_links_to_themselves():
    shared = played(start(1, 1.0), start(2, 1.0, queue="b"), Wait(1), Wait(2))
    assert shared.seconds == pytest.approx(2.0)
    apart = played(start(1, 1.0), start(2, 1.0, queue="b", link="other"), Wait(1), Wait(2))
    assert apart.seconds == pytest.approx(1.0)


def test_latency_takes_nothing_of_the_link():
    found = played(
        start(1, 1.0, latency=1.0), start(2, 1.0, queue="b"), Wait(1), Wait(2)
    )  # the second is over when the first begins to flow
    assert found.seconds == pytest.approx(2.0)


def test_what_follows_another_waits_for_it():
    found = played(start(1, 1.0), start(2, 1.0, queue="b", after=1), Wait(2))
    assert found.seconds == pytest.approx(2.0)
    assert [(each.lane, each.began) for each in found.stretches] == [("a", 0.0), ("b", 1.0)]


def test_what_was_started_goes_on_in_the_next_play():
    player = Player()
    assert player.play([start(1, 3.0), Compute(1.0, "x")]).seconds == 1.0
    found = player.play([Compute(1.0, "y"), Wait(1)])
    assert (found.seconds, found.waiting) == (2.0, 1.0)
    assert [(each.lane, each.began, each.ended) for each in found.stretches] == [
        (COMPUTE, 0.0, 1.0),
        ("a", -1.0, 2.0),
    ]


def test_ranks_drift_apart_with_the_root_of_the_time_since_they_met():
    apart: list[Task] = [Compute(4.0, "x"), start(1, 1.0, drift=0.1), Wait(1)]
    found = played(*apart)
    assert found.seconds == pytest.approx(4.0 + 0.2 + 1.0)
    # They met in the wait: what is started right after it starts with the others.
    again = played(*apart, start(2, 1.0, drift=0.1), Wait(2))
    assert again.seconds == pytest.approx(found.seconds + 1.0)
    # Who has something else to do does not notice; meanwhile nothing flows that slows it.
    hidden = played(*apart[:1], start(1, 1.0, drift=0.1, slows=0.5), Compute(5.0, "x"), Wait(1))
    assert hidden.seconds == pytest.approx(4.0 + 5.0 + 0.5)
    assert hidden.waiting == 0.0


def test_ranks_that_drift_go_on_drifting_in_the_next_step():
    player = Player()
    player.play([Compute(4.0, "x")])
    found = player.play([Compute(5.0, "x"), start(1, 1.0, drift=0.1), Wait(1)])
    assert found.seconds == pytest.approx(5.0 + 0.3 + 1.0)
