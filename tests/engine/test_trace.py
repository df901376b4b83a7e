"""Recorded events, bytes and buffers of the engine equal the planned ones."""

import pytest
import torch

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.buffers import planned_step, planned_update
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.schedule import BufferKind, Event, EventKind
from fsdpctl.plan.step_plan import Prefetch
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed, in_turn
from tests.engine.events import gathered_nbytes, recording, unsharded_units
from tests.engine.models import make_net, next_token_loss, run_window, token_batches
from tests.matrix import HALF, WHOLE, cases, half_of

MICRO_STEPS = {"one": (True,), "last": (False, False, True), "every": (True, True)}


def planned_events(model: ShardedModel) -> tuple[list[Event], ...]:
    """Return the events of a step with each accumulation, until gradients are dropped."""
    plan = model._runtime.plan
    passes = MICRO_STEPS.values()
    return tuple([*planned_step(plan, each), *planned_update(plan)] for each in passes)


def recorded_events(model: ShardedModel, rank: int) -> tuple[list[Event], ...]:
    optimizer = ShardedAdamW(model, lr=1e-2)
    batches = token_batches(1, model.collectives.size, micro_steps=3)[0][rank]
    traces = []
    for reduces in MICRO_STEPS.values():
        with recording(model) as trace:
            run_window(model, batches, reduces)
            optimizer.step()
        optimizer.zero_grad()
        traces.append(trace)
    return tuple(traces)


PREFETCHES = [(0, 0), (0, 1), (1, 1), (2, 1)]
HYBRIDS = [name for name, row in STRATEGIES.items() if row.replicates]


@WHOLE
@HALF
@distributed(world_size=2)
def test_events_bytes_and_buffers_equal_the_plan(rank, world_size, whole, half):
    every = cases(PREFETCHES, [False, True], list(STRATEGIES), whole=whole)
    for prefetch, tied, strategy in half_of(every, half):
        depth, net = Prefetch(*prefetch), make_net(tied=tied)
        model = shard_model(net, strategy, prefetch=depth)
        assert recorded_events(model, rank) == planned_events(model), (strategy, prefetch, tied)


@pytest.mark.slow
@WHOLE
@distributed(world_size=4)
def test_events_of_replicas_equal_the_plan(rank: int, world_size: int, whole: bool) -> None:
    for strategy, bf16, size in cases(HYBRIDS, [False, True], [1, 2, 4], whole=whole):
        check_events_of_replicas(rank, strategy, size, bf16=bf16)


@distributed(world_size=4)
def test_events_of_replicas_that_share_states_equal_the_plan(rank: int, world_size: int) -> None:
    check_events_of_replicas(rank, "hybrid_shard_optimizer", 2, bf16=False)


def check_events_of_replicas(rank: int, strategy: str, size: int, *, bf16: bool) -> None:
    precision = Precision(torch.bfloat16, torch.bfloat16) if bf16 else Precision()
    model = shard_model(make_net(tied=False), strategy, dp_shard_size=size, precision=precision)
    assert recorded_events(model, rank) == planned_events(model), (strategy, size, bf16)


@pytest.mark.parametrize("world_size", [2, 3])
@distributed()
def test_events_of_owner_maps_equal_the_plan(rank: int, world_size: int) -> None:
    for owner_map in ("round_robin", "contiguous", "balanced"):
        model = shard_model(make_net(tied=True), "shard_optimizer", owner_map=owner_map)
        assert recorded_events(model, rank) == planned_events(model), owner_map


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_events_of_one_rank_equal_the_plan(strategy: str) -> None:
    model = shard_model(make_net(tied=True), strategy)
    assert recorded_events(model, 0) == planned_events(model)


@distributed(world_size=2)
@in_turn(strategy=list(STRATEGIES))
def test_counted_bytes_are_those_of_the_storages(rank: int, world_size: int, strategy: str) -> None:
    """Compare while gradients are held, after they are reduced, and after a step."""
    model = shard_model(make_net(tied=True), strategy)
    optimizer = ShardedAdamW(model, lr=1e-2)
    batch = token_batches(1, world_size)[0][rank][0]

    def check() -> None:
        gradients = [s.grad for s in model.flat_shards() if s.grad is not None]
        reduced = sum(each.untyped_storage().nbytes() for each in gradients)
        whole = [each.held_gradients for each in model._runtime.buffers]
        held = sum(each.untyped_storage().nbytes() for each in whole if each is not None)
        accounting = model.accounting
        assert accounting.total(BufferKind.GRADS) == reduced
        assert accounting.total(BufferKind.UNSHARDED_GRADS) == held
        assert accounting.total(BufferKind.PARAMS) == gathered_nbytes(model)
        assert accounting.nbytes == reduced + held + gathered_nbytes(model)

    with model.no_sync():
        next_token_loss(model, batch).backward()
    check()
    assert model.accounting.total(BufferKind.UNSHARDED_GRADS)
    next_token_loss(model, batch).backward()
    check()
    assert model.accounting.total(BufferKind.GRADS)
    optimizer.step()
    optimizer.zero_grad()
    check()
    assert model.accounting.nbytes == gathered_nbytes(model)


@distributed(world_size=2)
@in_turn(tied=[False, True])
def test_unsharded_parameters_equal_the_plan(rank: int, world_size: int, tied: bool) -> None:
    """Two blocks, root, embedding and head have memory after every event."""
    model = shard_model(make_net(tied=tied), "full_shard")
    nbytes = {name: unit.nbytes for name, unit in model._runtime.units.items()}
    blocks = [name for name in nbytes if name.startswith("blocks.")]
    block = max(nbytes[name] for name in blocks)
    two_blocks = 2 * block  # permanent unshard buffers, whether in use or not
    oversize = nbytes.keys() - blocks
    shared = {name for name in oversize if name != "root" and nbytes[name] <= two_blocks}
    seen: list[tuple[int, frozenset[str]]] = []

    def look() -> None:
        if trace[-1].kind not in (EventKind.ALLOCATE, EventKind.DEALLOCATE, EventKind.FREE):
            seen.append((gathered_nbytes(model), unsharded_units(trace)[-1]))

    with recording(model) as trace:
        model.accounting.on_event = look
        next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    assert len(seen) > len(nbytes)
    for taken, alive in seen:
        assert len([name for name in alive if name in blocks]) <= 2
        alone = sum(nbytes[name] for name in alive if name in oversize - shared)
        assert taken == two_blocks + alone
    assert gathered_nbytes(model) == two_blocks


@distributed(world_size=2)
def test_evaluation_frees_every_gathered_unit(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    with recording(model) as trace, torch.no_grad():
        model(token_batches(1, world_size)[0][rank][0])
    gathered = [event.unit for event in trace if event.kind is EventKind.GATHER]
    freed = [event.unit for event in trace if event.kind is EventKind.FREE]
    assert sorted(gathered) == sorted(freed)
