"""No stream of the CUDA path reads, writes or frees what another one still uses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdpctl.comm.base import Handle
from fsdpctl.comm.mesh import Mesh, make_mesh
from fsdpctl.engine.build import Division, Source, build_runtime, divide_module
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.renewal import Renewal
from fsdpctl.engine.streams import ComputeStream
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import record_step
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.plan.units import lay_out
from fsdpctl.resolve.blocks import checkpoint_block
from tests.engine.models import OddNet, next_token_loss, token_batches
from tests.engine.odd import freeze_all_but_vectors
from tests.engine.races import NcclOnCpu, RaceDetector, Stream, detecting_races

RANKS = 8


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@dataclass(frozen=True)
class Case:
    strategy: str
    depth: int = 1  # of prefetch, both ways
    holds: bool = False  # accumulation that communicates once
    recomputes: bool = False
    bf16: bool = False
    narrow: bool = False  # bf16 on the wire, added in fp32
    wide: bool = False  # an embedding that is reduced in pieces
    owner_map: str = "even"
    in_part: bool = False  # two buffers a unit: what is trained of it, and what is not

    def __str__(self) -> str:
        words = [self.strategy, f"depth {self.depth}", self.owner_map]
        switches = ("holds", "recomputes", "bf16", "narrow", "wide", "in_part")
        return ", ".join(words + [name for name in switches if getattr(self, name)])


CASES = (
    [
        Case(strategy, depth, holds, recomputes, bf16)
        for strategy in STRATEGIES
        for depth in ((0, 1, 2) if STRATEGIES[strategy].shards_params else (1,))
        for holds in (False, True)
        for recomputes in (False, True)
        for bf16 in (False, True)
    ]
    + [
        Case("shard_optimizer", bf16=bf16, owner_map=owner_map)
        for owner_map in ("round_robin", "balanced")
        for bf16 in (False, True)
    ]
    + [
        Case(strategy, holds=holds, bf16=True, narrow=narrow, wide=wide)
        for strategy, row in STRATEGIES.items()
        if row.shards_params
        for holds in (False, True)
        for narrow, wide in ((True, False), (False, True), (True, True))
    ]
    + [
        Case(strategy, holds=holds, bf16=bf16, in_part=True)
        for strategy in STRATEGIES
        for holds in (False, True)
        for bf16 in (False, True)
    ]
)
SAMPLE = {
    Case("full_shard", 2, holds=True, recomputes=True, bf16=True),
    Case("hybrid_shard", bf16=True, narrow=True, wide=True),
    Case("hybrid_shard_optimizer", bf16=True, narrow=True, wide=True),
    Case("shard_optimizer", bf16=True, owner_map="balanced"),
    Case("full_shard", bf16=True, in_part=True),
}


def made(case: Case) -> ShardedModel:
    net, row = OddNet(tied=False, vocab=401 if case.wide else 17), STRATEGIES[case.strategy]
    if case.in_part:
        freeze_all_but_vectors(net)
    if case.recomputes:
        for block in net.blocks:
            checkpoint_block(block, "full")
    device, world = torch.device("cpu"), NcclOnCpu(torch.device("cpu"))
    mesh = make_mesh(world, device, RANKS)
    if row.replicates:
        shard = NcclOnCpu(device, [range(4), range(4, 8)])
        shard.separate_reductions()
        mesh = Mesh(world, shard, NcclOnCpu(device, [[part, part + 4] for part in range(4)]))
    specs, shares = divide_module(net, None), row.shares(mesh.num_replicas)
    runtime = build_runtime(
        net,
        Division(specs, lay_out(specs, mesh.shard.size, case.owner_map, shares=shares)),
        mesh,
        Source(device),
        strategy=row,
        prefetch=Prefetch(case.depth, case.depth),
        precision=Precision(
            torch.bfloat16 if case.bf16 else None,
            wire_dtype=torch.bfloat16 if case.narrow else None,
        ),
    )
    return ShardedModel(net, runtime, row)


def train(case: Case) -> None:
    """Two micro-batches a step, an evaluation in between, and gathers that begin early."""
    model = made(case)
    model._presence._check = lambda *about: None  # type: ignore[method-assign]  # nobody adds here
    model.overlap_param_gather = True
    optimizer = ShardedAdamW(model, lr=1e-3)
    ones = torch.ones(())
    for of_ranks in token_batches(3, 1, 2):
        first, second = of_ranks[0]
        if case.holds:
            with model.no_sync():
                next_token_loss(model, first).backward()
        else:
            next_token_loss(model, first).backward()
        with torch.no_grad():
            model(first)
        loss = next_token_loss(model, second)
        loss.backward()
        record = record_step(
            model, loss_sum=loss.detach(), tokens=ones, nominal_tokens=3, max_grad_norm=1.0
        )
        optimizer.step(grad_scale=record.grad_scale, found_inf=torch.zeros(()))
        optimizer.zero_grad()
        if model.can_prefetch:
            model.prefetch_forward_params()


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in SAMPLE else pytest.mark.slow, id=str(c)) for c in CASES],
)
def test_no_stream_touches_what_another_one_uses(monkeypatch, case):
    with detecting_races(monkeypatch) as found:
        train(case)
    assert found.num_operations > 500
    assert not found.problems


def no_wait_for_what_came_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "wait_stream", lambda self, other: None)


def no_wait_for_results(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "wait_event", lambda self, event: None)
    patch.setattr(Stream, "wait_stream", lambda self, other: merge(self, other.clock))


def merge(stream: Stream, clock: dict[int, int]) -> None:
    for number, time in clock.items():
        stream.clock[number] = max(stream.clock.get(number, 0), time)


def gathers_where_it_reduces(patch: pytest.MonkeyPatch) -> None:
    """A copy of the masters on a stream that has not waited for the optimizer."""
    right = NcclOnCpu.gather_together

    def wrong(self, buffers):
        for each in buffers:
            own = each.parts[self.rank]
            if each.shard is not None:
                with torch.cuda.stream(self.reduce_stream):
                    each.whole[own.start : own.stop].copy_(each.shard)
        return right(self, [replace(each, shard=None) for each in buffers])

    patch.setattr(NcclOnCpu, "gather_together", wrong)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_wait_for_what_came_before, no_wait_for_results, gathers_where_it_reduces,
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "hybrid_shard_optimizer"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(monkeypatch, fault, strategy):
    with detecting_races(monkeypatch) as found:
        fault(monkeypatch)
        train(Case(strategy))
    assert found.problems


def test_gradients_that_go_before_the_sum_over_copies_has_read_them_are_found(monkeypatch):
    with detecting_races(monkeypatch) as found:
        chain = NcclOnCpu.chain

        def at_once(self, after, reduction, *about):
            read, combined = chain(self, after, reduction, *about)
            return Handle(lambda: torch.empty(0)), combined

        monkeypatch.setattr(NcclOnCpu, "chain", at_once)
        train(Case("hybrid_shard"))
    assert found.problems


@pytest.mark.parametrize("bf16", [False, True])
def test_a_gather_of_what_copies_have_not_sent_yet_is_found(monkeypatch, bf16):
    with detecting_races(monkeypatch) as found:
        monkeypatch.setattr(Renewal, "begin_gather", lambda self, name: None)
        train(Case("hybrid_shard_optimizer", bf16=bf16))
    assert found.problems


def test_another_stream_than_that_of_sharding_is_refused(monkeypatch):
    streams = [Stream(), Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    stream = ComputeStream(torch.device("cuda", 0))
    stream.refuse_another()
    streams.reverse()
    with pytest.raises(EngineError, match="another CUDA stream"):
        stream.refuse_another()


def test_memory_that_ends_too_early_is_found():
    detector, side = RaceDetector(), Stream()
    with detector:
        values = torch.ones(4)
        with detector.on(side):
            side.wait_stream(detector.compute)
            values.add_(1)
        del values
        torch.ones(1)
    assert detector.problems == {"memory ends while another stream uses it": 1}
