"""Ranks that share memory."""

import os
import subprocess
import time
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.comm import shared_memory
from fsdpctl.comm.collectives import AllGatherInput, Reduction
from fsdpctl.comm.shared_memory import SharedCollectives, SharedMemory
from fsdpctl.engine.build import Sharding
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import EngineError
from fsdpctl.plan.layout import EvenSpans
from fsdpctl.plan.step_plan import Prefetch
from tests.distributed import distributed
from tests.engine import test_parity as parity
from tests.engine.models import make_net, token_batches
from tests.engine.odd import KINDS
from tests.engine.test_trace import planned_events, recorded_events
from tests.matrix import WHOLE, fast

F32 = torch.float32


def sharing(module: nn.Module, strategy: str = "full_shard", owners: str = "even") -> ShardedModel:
    return shard_model(module, Sharding(strategy, owner_map=owners, share_memory=True))


@dataclass(frozen=True)
class Case(parity.Case):
    """A case of test_parity over shared memory."""

    @property
    def exact(self) -> bool:
        return self.window != "every"

    def trained(self, rank: int) -> dict[str, Tensor]:
        kind = KINDS[self.kind]
        net: nn.Module = kind.make().to(self.dtype)
        model = sharing(net, *self.sharding)
        assert model.mesh.shard.shares_memory
        parity.train(model, rank, self.batches, kind, self.window)
        state: dict[str, Tensor] = model.state_dict()
        return state


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize("world_size", fast(3, slow=[2, 4, 8]))
@distributed(timeout=600)
def test_equals_one_process_bit_for_bit(rank: int, world_size: int, whole: bool) -> None:
    """Train every kind of module in some windows or all; strategies and owner maps take turns."""
    turns, windows, kinds = cycle(parity.SHARDINGS), list(parity.WINDOWS), list(KINDS)
    some = [(kind, windows[at % len(windows)]) for at, kind in enumerate(kinds)]
    result = list(product(kinds, windows)) if whole else some
    parity.check(rank, (Case(next(turns), *each, world_size) for each in result))


@distributed(world_size=2)
def test_events_bytes_and_buffers_equal_the_plan(rank: int, world_size: int) -> None:
    net, depth = make_net(tied=True), Prefetch(1, 1)
    model = shard_model(net, Sharding("hybrid_shard", prefetch=depth, share_memory=True))
    assert recorded_events(model, rank) == planned_events(model)


@distributed(world_size=2)
def test_parameters_stand_once_and_other_users_cannot_open_them(rank: int, world_size: int) -> None:
    model = sharing(make_net(tied=False))
    (at_rest, *_) = model.module.parameters()
    with torch.no_grad():
        model.collectives.barrier()
        if rank == 0:
            at_rest.fill_(7)
        model.collectives.barrier()
    assert bool((at_rest == 7).all())
    opened: list[int] = []
    real = os.ftruncate

    def looked_at(file: int, size: int) -> None:
        assert os.fstat(file).st_mode & 0o777 == 0o600
        assert os.fstat(file).st_nlink == 0  # the file has no name
        opened.append(file)
        real(file, size)

    with mock.patch.object(os, "ftruncate", looked_at):
        model.mesh.shard.allocate_shared([1])
    assert len(opened) == (rank == 0)
    if rank == 0:
        assert not Path(f"/proc/self/fd/{opened[0]}").exists()  # closed: others have mapped it


@pytest.mark.parametrize("world_size", fast(2, slow=[9]))
@distributed(timeout=120)
def test_what_does_not_fit_goes_over_gloo(rank: int, world_size: int) -> None:
    kind, batches = KINDS["tied embedding"], token_batches(3, world_size)
    states = []
    for room in (None, 256):
        with mock.patch.object(SharedCollectives, "reserve_outbox", _reserving(room)):
            model = sharing(kind.make())
        parity.train(model, rank, batches, kind, "one")
        states.append(model.state_dict())
    assert parity.largest_difference(*states) == 0


def _reserving(room: int | None) -> object:
    real = SharedCollectives.reserve_outbox
    return lambda self, nbytes: real(self, nbytes if room is None else room)


@distributed(world_size=2)
def test_an_outbox_is_as_large_as_the_largest_model_needs(rank: int, world_size: int) -> None:
    ranks = SharedCollectives()
    parts = EvenSpans(64, world_size)
    for size in (512, 64, 512):
        ranks.reserve_outbox(size)
        gradients = torch.arange(128, dtype=torch.float32)
        total = torch.empty(64)
        ranks.reduce_scatter(gradients, parts).finish(total, 0.5, torch.float32)
        assert torch.equal(total, gradients[rank * 64 : (rank + 1) * 64])


@distributed(world_size=2)
def test_a_gather_to_other_memory_transfers(rank: int, world_size: int) -> None:
    """The gather also transfers if torch reuses addresses of freed shared memory."""
    ranks, parts = SharedCollectives(), EvenSpans(64, world_size)
    (shared,) = ranks.allocate_shared([512])
    assert ranks.memory.contains(shared)
    del shared
    # Only the counters are still mapped.
    assert sum(mapped() is not None for mapped, _ in ranks.memory._ranges) == 1
    whole = torch.zeros(128)
    ranks.all_gather([AllGatherInput(whole, parts, torch.full((64,), rank + 1.0))]).wait()
    assert whole.sum() == 64 * (1 + 2)


@distributed(world_size=2)
def test_without_sharing_gloo_is_used_and_a_line_says_why(rank: int, world_size: int) -> None:
    kind, batches = KINDS["tied embedding"], token_batches(2, world_size)
    with mock.patch.object(shared_memory, "_host_key", return_value=f"host {rank}"):
        if rank == 0:
            with pytest.warns(UserWarning, match="ranks do not share memory: the ranks run on sev"):
                model = sharing(kind.make())
        else:
            model = sharing(kind.make())
    assert not model.mesh.shard.shares_memory
    parity.train(model, rank, batches, kind, "one")
    with_it = sharing(kind.make())
    parity.train(with_it, rank, batches, kind, "one")
    assert parity.largest_difference(model.state_dict(), with_it.state_dict()) == 0


@distributed(world_size=2)
def test_a_lack_of_memory_is_an_answer_on_every_rank(rank: int, world_size: int) -> None:
    ranks = SharedCollectives()
    with pytest.raises(EngineError, match=r"\([0-9,]+ bytes\); set launch.share_memory=false"):
        ranks.allocate_shared([1 << 62])


@distributed(world_size=2, timeout=30)
def test_a_rank_that_waits_in_vain_says_for_what(rank: int, world_size: int) -> None:
    ranks = SharedCollectives()
    ended = subprocess.Popen(["true"])
    with mock.patch.object(shared_memory, "_CHECK_SECONDS", 0.01):
        memory = SharedMemory(ranks.all_gather_values, rank, 0.05)
        if rank == 0:
            memory.raise_counter(0)
            with pytest.raises(EngineError, match="0 s: waiting for bread of rank 1"):
                memory.wait(0, 1, "bread")
        gone = SharedMemory(ranks.all_gather_values, rank, 60.0)
        gone._process_poll.register(watched := os.pidfd_open(ended.pid))
        with pytest.raises(EngineError, match="rank has ended"):
            gone.wait(0, 1, "bread")
    ended.wait()
    os.close(watched)


def test_counters_of_32_bits_go_round() -> None:
    most = 2**31 - 1
    assert shared_memory._is_before(6, 7)
    assert not shared_memory._is_before(7, 7)
    assert shared_memory._is_before(most, most + 1)
    assert not shared_memory._is_before(-most - 1, most + 1)  # as int32
    assert not shared_memory._is_before(3, 2**32 + 3)


@distributed(world_size=3)
def test_messages_fit_in_any_order_that_the_plan_allows(rank: int, world_size: int) -> None:
    """All reserved bytes are in flight, in messages that leave gaps."""
    ranks, limit = SharedCollectives(), 24
    parts, unit = EvenSpans(64, world_size), 64 * world_size * 4
    ranks.reserve_outbox(limit * unit)
    sent: list[tuple[int, Reduction]] = []
    for size in [6, 10, 10] * 4 + [24, 1, 23]:
        while sum(each for each, _ in sent) + size > limit:
            _, oldest = sent.pop(0)
            oldest.wait()
        parts = EvenSpans(64 * size, world_size)
        values = torch.ones(parts[-1].stop)
        number = ranks._num_sent
        sent.append((size, ranks.reduce_scatter(values, parts)))
        assert ranks._num_sent == number + 1, "went over gloo"
    for _, reduction in sent:
        reduction.wait()


@distributed(world_size=2)
def test_parameters_are_written_once_no_rank_reads_them(rank: int, world_size: int) -> None:
    """A rank that evaluates longer than the other reads the old values to the end."""
    model = sharing(make_net(tied=False))
    state = {name: each + 1 for name, each in model.state_dict().items()}
    (tokens,) = token_batches(1, 1)[0][0]
    with torch.no_grad():
        before = model(tokens)
        if rank == 1:
            time.sleep(0.3)
            assert torch.equal(model(tokens), before)
    model.load_state_dict(state)
    assert parity.largest_difference(model.state_dict(), state) == 0
