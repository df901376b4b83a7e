"""What was measured, and what is made of it between and beyond."""

import json
from dataclasses import asdict, replace

import pytest

from fsdpctl.errors import UsageError
from fsdpctl.plan.work import Work, WorkKind
from fsdpctl.predict.network import NET, NODE, CollectiveKind, Group
from fsdpctl.predict.profile import (
    VERSION,
    MeasuredDevice,
    MeasuredNetwork,
    Observed,
    Point,
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
    per_operator=1e-7,
    copying=[Point(1e3, 1e-6), Point(1e6, 1e-3)],
    stepping=[Point(1e3, 1e-6), Point(1e6, 7e-3)],
    collectives={kind.value: [Point(1e3, 1e-4), Point(1e6, 1e-2)] for kind in CollectiveKind},
    slows=0.5,
    yields=0.25,
    drift=0.02,
)


def test_times_lie_straight_between_what_was_measured():
    points = [Point(10, 1.0), Point(20, 3.0)]
    assert [on_curve(points, n) for n in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_operators_take_what_those_of_their_name_and_size_took():
    device = MeasuredDevice(PROFILE)
    product = Work("mm", WorkKind.MATMUL, 2 * 64**3, 0, 4, (1, 64, 64, 64))
    assert device.seconds(product) == pytest.approx(1e-3, rel=0.01)
    like = Work("addmm", WorkKind.MATMUL, 2 * 64**3, 0, 4, (1, 64, 64, 64))
    assert device.seconds(like) == device.seconds(product)  # by its kind
    other = Work("mul", WorkKind.MEMORY, 0, 2000, 4)
    assert device.seconds(other) == pytest.approx(2e-6 + 1e-7)
    unknown = Work("flash", WorkKind.ATTENTION, 10, 1000, 4, (1, 1, 8, 8))
    assert device.seconds(unknown) == pytest.approx(1e-6 + 1e-7)


def test_a_collective_takes_what_it_took_or_what_the_cable_needs():
    about = (PROFILE.collectives, PROFILE.ranks, PROFILE.slows, PROFILE.yields, 0.02)
    here = MeasuredNetwork(*about, inter=None).transfer(CollectiveKind.GATHER, 1e6, Group(2, 1))
    assert here.link == NODE
    assert here.latency + here.seconds == pytest.approx(1e-2)
    assert (here.nbytes, here.slows, here.yields, here.drift) == (5e5, 0.5, 0.25, 0.02)
    slow = MeasuredNetwork(*about, inter=1e7).transfer(CollectiveKind.GATHER, 1e6, Group(2, 2))
    assert slow.link == NET
    assert slow.seconds == pytest.approx(0.05 / 0.94)
    # It takes as much of the cores as here, over a longer time.
    assert slow.slows == pytest.approx(0.01 / (0.05 / 0.94) * 0.5)
    assert slow.yields == 0.0
    both = MeasuredNetwork(*about, inter=1e7).transfer(CollectiveKind.ALL_REDUCE, 1e6, Group(2, 2))
    assert both.nbytes == 2 * slow.nbytes


def test_a_file_is_read_again(tmp_path):
    file = tmp_path / "here.json"
    file.write_text(json.dumps(asdict(PROFILE)))
    assert read_profile(file) == PROFILE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "version"),
        ("nothing", "not JSON"),
        (json.dumps(asdict(replace(PROFILE, version=VERSION + 1))), "this version reads"),
        (json.dumps(asdict(replace(PROFILE, copying=[]))), "has no"),
        (json.dumps({**asdict(PROFILE), "operators": [["mm"]]}), "operators"),
        (json.dumps({**asdict(PROFILE), "slows": 2.0}), "slows"),
        (json.dumps(asdict(replace(PROFILE, copying=[Point(1, -1.0)]))), "copying"),
    ],
)
def test_what_is_no_profile_is_refused(content, said, tmp_path):
    file = tmp_path / "here.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=said):
        read_profile(file)
