"""Profiles, and the times predicted between and beyond the measured sizes."""

import json
from dataclasses import asdict, replace

import pytest

from fsdpctl.errors import UsageError
from fsdpctl.predict.compute import Work, WorkKind
from fsdpctl.predict.hardware import NET, NODE, CollectiveKind, Group
from fsdpctl.predict.profile import (
    VERSION,
    MeasuredDevice,
    MeasuredNetwork,
    MeasuredPoint,
    Observed,
    Profile,
    on_curve,
    read_profile,
)

MM = WorkKind.MATMUL.value
PROFILE = Profile(
    version=VERSION,
    device="cpu",
    is_cuda=False,
    dtype="float32",
    ranks=2,
    torch="2.13.0",
    operators=[
        Observed("mm", MM, 2 * 64**3, 0, 4, (1, 64, 64, 64), 1e-3),
        Observed("mm", MM, 2 * 256**3, 0, 4, (1, 256, 256, 256), 16e-3),
        Observed("mul", "memory", 0, 1000, 4, (0, 0, 0, 0), 1e-6),
        Observed("mul", "memory", 0, 3000, 4, (0, 0, 0, 0), 3e-6),
    ],
    host_seconds_per_operator=1e-7,
    memory_copy=[MeasuredPoint(1e3, 1e-6), MeasuredPoint(1e6, 1e-3)],
    optimizer_step=[MeasuredPoint(1e3, 1e-6), MeasuredPoint(1e6, 7e-3)],
    collectives={
        kind.value: [MeasuredPoint(1e3, 1e-4), MeasuredPoint(1e6, 1e-2)] for kind in CollectiveKind
    },
    compute_slowdown=0.5,
    comm_slowdown=0.25,
    drift=0.02,
)


def test_times_are_linear_between_measured_sizes():
    points = [MeasuredPoint(10, 1.0), MeasuredPoint(20, 3.0)]
    assert [on_curve(points, n) for n in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_operators_take_the_time_of_those_with_their_name_and_size():
    device = MeasuredDevice(PROFILE)
    product = Work("mm", WorkKind.MATMUL, 2 * 64**3, 0, 4, (1, 64, 64, 64))
    assert device.seconds(product) == pytest.approx(1e-3, rel=0.01)
    like = Work("addmm", WorkKind.MATMUL, 2 * 64**3, 0, 4, (1, 64, 64, 64))
    assert device.seconds(like) == device.seconds(product)  # by its kind
    other = Work("mul", WorkKind.MEMORY, 0, 2000, 4)
    assert device.seconds(other) == pytest.approx(2e-6 + 1e-7)
    unknown = Work("flash", WorkKind.ATTENTION, 10, 1000, 4, (1, 1, 8, 8))
    assert device.seconds(unknown) == pytest.approx(1e-6 + 1e-7)


def test_a_collective_takes_its_measured_time_or_that_of_a_slower_link():
    gather, reduce = CollectiveKind.GATHER, CollectiveKind.ALL_REDUCE
    here = MeasuredNetwork(PROFILE, inter=None).transfer(gather, 1e6, Group(2, 1))
    assert here.link == NODE
    assert here.latency + here.seconds == pytest.approx(1e-2)
    about = (here.nbytes, here.compute_slowdown, here.comm_slowdown, here.drift)
    assert about == (5e5, 0.5, 0.25, 0.02)
    slow = MeasuredNetwork(PROFILE, inter=1e7).transfer(gather, 1e6, Group(2, 2))
    assert slow.link == NET
    assert slow.seconds == pytest.approx(0.05 / 0.94)
    # It takes as much of the cores as within a node, over a longer time.
    assert slow.compute_slowdown == pytest.approx(0.01 / (0.05 / 0.94) * 0.5)
    assert slow.comm_slowdown == 0.0
    both = MeasuredNetwork(PROFILE, inter=1e7).transfer(reduce, 1e6, Group(2, 2))
    assert both.nbytes == 2 * slow.nbytes


def test_a_written_profile_is_read(tmp_path):
    file = tmp_path / "here.json"
    file.write_text(json.dumps(asdict(PROFILE)))
    assert read_profile(file) == PROFILE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "version"),
        ("nothing", "not JSON"),
        (json.dumps(asdict(replace(PROFILE, version=VERSION + 1))), "not supported"),
        (json.dumps(asdict(replace(PROFILE, memory_copy=[]))), "are required"),
        (json.dumps({**asdict(PROFILE), "operators": [["mm"]]}), "operators"),
        (json.dumps({**asdict(PROFILE), "compute_slowdown": 2.0}), "compute_slowdown"),
        (json.dumps(asdict(replace(PROFILE, memory_copy=[MeasuredPoint(1, -1.0)]))), "memory_copy"),
    ],
)
def test_invalid_profiles_are_rejected(content, message, tmp_path):
    file = tmp_path / "here.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_profile(file)
