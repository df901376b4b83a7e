"""Concurrent tasks, with results computed by hand."""

import pytest

from fsdpctl.predict.simulator import Compute, SimulatedStep, Start, Task, Transfer, Wait
from fsdpctl.predict.step_recorder import TransferKeys
from tests.predict.timeline import COMPUTE, Timeline, spans


def simulated(*tasks: Task) -> SimulatedStep:
    return Timeline().run(tasks)


def start(
    key: int, seconds: float, *, queue: str = "a", after: TransferKeys = (), **options
) -> Start:
    link, latency = options.pop("link", "wire"), options.pop("latency", 0.0)
    transfer = Transfer(link, latency, seconds, **options)
    return Start(key, queue, transfer, f"transfer {key}", after)


def test_computation_hides_concurrent_transfers():
    timeline = simulated(start(1, 2.0), Compute(3.0, "x"), Wait(1))
    assert (timeline.seconds, timeline.exposed_communication) == (3.0, 0.0)
    timeline = simulated(start(1, 5.0), Compute(3.0, "x"), Wait(1))
    assert (timeline.seconds, timeline.exposed_communication) == (5.0, 2.0)


def test_a_transfer_slows_down_concurrent_computation():
    timeline = simulated(start(1, 2.0, compute_slowdown=0.25), Compute(3.0, "x"), Wait(1))
    # In 2 seconds, computation of 1.5 seconds is done; 1.5 seconds follow.
    assert timeline.seconds == timeline.seconds_by_phase["compute"] == pytest.approx(3.5)


def test_computation_slows_down_a_concurrent_transfer():
    timeline = simulated(start(1, 2.0, comm_slowdown=0.5), Compute(1.0, "x"), Wait(1))
    assert timeline.seconds == pytest.approx(2.5)  # half of the first second's transfer is done
    assert timeline.exposed_communication == pytest.approx(1.5)


def test_a_queue_runs_in_order():
    timeline = simulated(start(1, 1.0), start(2, 1.0), Wait(2))
    assert timeline.seconds == pytest.approx(2.0)
    assert [each.label for each in spans(timeline)] == ["transfer 1", "transfer 2"]


def test_two_queues_share_a_link_but_not_two_links():
    shared = simulated(start(1, 1.0), start(2, 1.0, queue="b"), Wait(1), Wait(2))
    assert shared.seconds == pytest.approx(2.0)
    apart = simulated(start(1, 1.0), start(2, 1.0, queue="b", link="other"), Wait(1), Wait(2))
    assert apart.seconds == pytest.approx(1.0)


def test_latency_does_not_occupy_the_link():
    timeline = simulated(
        start(1, 1.0, latency=1.0), start(2, 1.0, queue="b"), Wait(1), Wait(2)
    )  # transfer 2 has ended when the data of transfer 1 is sent
    assert timeline.seconds == pytest.approx(2.0)


def test_a_collective_waits_for_the_transfers_in_after():
    timeline = simulated(start(1, 1.0), start(2, 1.0, queue="b", after=(1,)), Wait(2))
    assert timeline.seconds == pytest.approx(2.0)
    assert [(each.lane, each.start) for each in spans(timeline)] == [("a", 0.0), ("b", 1.0)]


def test_collectives_in_flight_continue_in_the_next_run():
    simulator = Timeline()
    assert simulator.run([start(1, 3.0), Compute(1.0, "x")]).seconds == 1.0
    result = simulator.run([Compute(1.0, "y"), Wait(1)])
    assert (result.seconds, result.exposed_communication) == (2.0, 1.0)
    assert [(each.lane, each.start, each.end) for each in spans(result)] == [
        (COMPUTE, 0.0, 1.0), ("a", -1.0, 2.0),
    ]  # fmt: skip
