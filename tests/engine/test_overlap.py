"""Overlap of communication, by a clock that only collectives and blocks advance.

The engine runs unchanged. Blocks take time on the clock, and so do collectives, each kind on a
separate channel. The time that the model waits is exposed communication.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import (
    AllGatherInput,
    Collectives,
    Handle,
    InPlaceReduction,
    Reduction,
)
from fsdpctl.comm.mesh import make_mesh
from fsdpctl.engine.build import WeightInit, build_runtime
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.engine.unit import HostParamPool
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import Prefetch, StepPlan
from fsdpctl.plan.strategy import Offload, get_strategy
from fsdpctl.plan.units import ModelLayout, unit_layouts

COMPUTE, DELAY = 1.0, 0.9  # time of a block's forward, and of a collective
BLOCKS = 8


class Clock:
    """A clock that advances when a block computes and when the model waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.exposed = {"gather": 0.0, "reduce": 0.0}  # time of waiting, by kind
        self.started = {"copy": 0, "gather": 0, "reduce": 0}
        self.delays = {"copy": DELAY, "gather": DELAY, "reduce": DELAY}
        self.free = {"copy": 0.0, "gather": 0.0, "reduce": 0.0}  # when each channel is free

    def start(self, kind: str, after: float = 0.0) -> Callable[[], None]:
        """Start a collective when its channel is free; return a function that waits for its end."""
        end = max(self.now, self.free[kind], after) + self.delays[kind]
        self.free[kind] = end
        self.started[kind] += 1

        def wait() -> None:
            self.exposed[kind] += max(0.0, end - self.now)
            self.now = max(self.now, end)

        return wait


class Compute(torch.autograd.Function):
    """A function that takes the time of a block, and twice as much in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.now += COMPUTE
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.now += 2 * COMPUTE
        return gradient.clone(), None


class Block(nn.Module):
    """A block with a matrix, which advances the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.clock = clock

    def forward(self, x):
        """Compute, and advance the clock."""
        return Compute.apply(self.layer(x), self.clock)


class DelayedCollectives(Collectives):
    """The collectives of one rank, which take time on the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        wait = self.clock.start("gather", after=self.clock.free["copy"])  # after the last copy
        done = super().all_gather(buffers)

        def finish() -> Tensor:
            wait()
            return done.wait()

        return Handle(finish)

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Reduction:
        wait = self.clock.start("reduce")

        def finish() -> Tensor:
            wait()
            return whole

        return InPlaceReduction(Handle(finish))


def run(strategy: str, prefetch: Prefetch, clock: Clock, offload: str = "none") -> Clock:
    """Return the clock after a forward and a backward."""
    net = nn.Sequential(*(Block(clock) for _ in range(BLOCKS)))
    collectives, row = DelayedCollectives(clock), get_strategy(strategy)
    specs, device = module_units(net, ["Block"]), torch.device("cpu")
    mesh = make_mesh(collectives, device, collectives.size)
    division = ModelLayout(specs, unit_layouts(specs, 1), row)
    plan = StepPlan(division, mesh.position, prefetch=prefetch, offload=Offload.parse(offload))
    model = ShardedModel(net, build_runtime(net, plan, mesh, WeightInit(device)), row)
    model(torch.ones(2, 8)).sum().backward()
    return clock


def hidden_share(clock: Clock, kind: str) -> float:
    """Return the hidden share of the time, without the first gather or the last reduction."""
    return 1 - (clock.exposed[kind] - DELAY) / ((clock.started[kind] - 1) * DELAY)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("depth", [1, 2])
def test_prefetch_hides_all_but_the_first_gather(strategy: str, depth: int) -> None:
    clock = run(strategy, Prefetch(depth, depth), Clock())
    assert clock.started["reduce"] == BLOCKS
    assert hidden_share(clock, "gather") >= 0.8
    assert hidden_share(clock, "reduce") >= 0.8


def test_without_prefetch_every_gather_is_waited_for() -> None:
    clock = run("full_shard", Prefetch(0, 0), Clock())
    assert clock.started["gather"] == 2 * BLOCKS - 1  # the last block stays unsharded
    assert hidden_share(clock, "gather") <= 0.01
    assert hidden_share(clock, "reduce") >= 0.8


@pytest.mark.parametrize(("prefetch", "gathers"), [(Prefetch(1, 0), 7), (Prefetch(0, 1), 8)])
def test_each_direction_hides_its_own_gathers(prefetch: Prefetch, gathers: int) -> None:
    """Without prefetch in a direction, the model waits for the gathers of that direction."""
    assert run("full_shard", prefetch, Clock()).exposed["gather"] == pytest.approx(gathers * DELAY)


@pytest.mark.parametrize(("depth", "gathering", "share"), [
    (1, 0.0, 0.8),  # a single rank
    (2, DELAY, 0.8),  # a copy and then a gather, of two units at a time
    (0, 0.0, 0.0),
])  # fmt: skip
def test_parameters_come_from_the_host_behind_the_computation(depth, gathering, share):
    clock, right = Clock(), HostParamPool.copy_to_device
    clock.delays["gather"] = gathering

    def sent(self: HostParamPool, *args: Any) -> Any:
        clock.start("copy")
        return right(self, *args)

    with mock.patch.object(HostParamPool, "copy_to_device", sent):
        run("full_shard", Prefetch(depth, depth), clock, offload="all")
    assert clock.started["copy"] == 2 * BLOCKS - 1 - depth  # the last ones are still unsharded
    moving = DELAY + gathering
    assert 1 - (clock.exposed["gather"] - moving) / ((clock.started["copy"] - 1) * moving) >= share
    if not depth:
        assert clock.exposed["gather"] == pytest.approx(clock.started["copy"] * moving)
