"""Replicas of the model, which share optimizer states or store them all."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdpctl
from fsdpctl.comm.collectives import AllGatherInput, Collectives
from fsdpctl.errors import UsageError
from fsdpctl.plan.schedule import Event, EventKind
from fsdpctl.plan.strategy import STRATEGIES, Strategy, effective_strategy
from tests.distributed import distributed, in_turn
from tests.engine.events import gathered_nbytes, recording
from tests.engine.models import make_net, next_token_loss, one_step, sharded, token_batches
from tests.engine.test_parity import largest_difference
from tests.reference import train_reference

SHARED = "hybrid_shard_optimizer"
K = EventKind


@pytest.mark.parametrize(("strategy", "alone", "whole", "one_copy"), [
    ("hybrid_shard", "no_shard", "no_shard", "full_shard"),
    ("hybrid_shard_grad_op", "no_shard", "no_shard", "shard_grad_op"),
    (SHARED, "no_shard", "shard_optimizer", "full_shard"),
    ("full_shard", "no_shard", None, "full_shard"),
])  # fmt: skip
def test_a_single_replica_runs_the_strategy_without_replicas(strategy, alone, whole, one_copy):
    row = STRATEGIES[strategy]
    assert effective_strategy(row, 1, 1) == (STRATEGIES[alone], 1)
    assert effective_strategy(row, 8, 8) == (STRATEGIES[one_copy], 8)
    if whole is not None:
        assert effective_strategy(row, 1, 8) == (STRATEGIES[whole], 8)
        assert effective_strategy(row, 2, 8) == (row, 2)


def test_a_strategy_that_shares_unsharded_states_is_rejected():
    with pytest.raises(UsageError, match="strategy mine: shards_over_replicas requires replicates"):
        Strategy("mine", "", True, True, True, True, replicates=False, shards_over_replicas=True)


@distributed(world_size=4)
def test_after_a_backward_that_failed_the_next_step_is_right(rank: int, world_size: int) -> None:
    first, second = token_batches(2, world_size)
    expected = train_reference(make_net(tied=True), next_token_loss, [second])
    model = sharded(SHARED)
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)

    def fail(*options: object) -> None:
        raise ArithmeticError("in backward")

    handle = model.module.get_submodule("blocks.1").register_full_backward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        next_token_loss(model, first[rank][0]).backward()
    handle.remove()
    optimizer.zero_grad()
    one_step(model, optimizer, second[rank][0])
    assert largest_difference(model.state_dict(), expected) <= 1e-6
    assert model.accounting.nbytes == gathered_nbytes(model)


class Links:
    """A count of the bytes of full tensors in collectives, by group of ranks."""

    def __init__(self) -> None:
        self.nbytes = Counter[str]()

    def watch(self, name: str, collectives: Collectives) -> None:
        calls = "all_gather", "reduce_scatter", "start_all_reduce", "all_reduce", "broadcast"
        for call in calls:
            setattr(collectives, call, self._counted(name, getattr(collectives, call)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(values: Any, *others: Any, **more: Any) -> Any:
            tensors = [values] if isinstance(values, Tensor) else [_tensor(each) for each in values]
            self.nbytes[name] += sum(each.nbytes for each in tensors)
            return call(values, *others, **more)

        return counted


def _tensor(argument: AllGatherInput | tuple[object, Tensor]) -> Tensor:
    return argument.full if isinstance(argument, AllGatherInput) else argument[1]


def sent(events: list[Event], *kinds: EventKind) -> int:
    return sum(event.nbytes for event in events if event.kind in kinds)


@distributed(world_size=4)
@in_turn(bf16=[False, True])
def test_only_gradients_and_updates_are_sent_between_replicas(rank, world_size, bf16):
    """Between replicas, only a rank's shard is sent; over all ranks, next to nothing."""
    model = sharded(SHARED, precision=fsdpctl.Precision(torch.bfloat16 if bf16 else None))
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
    batch = token_batches(1, world_size)[0][rank][0]
    one_step(model, optimizer, batch)
    links, mesh = Links(), model.mesh
    assert mesh.replicas is not None
    groups = {"in": mesh.shard, "between": mesh.replicas, "all": mesh.world}
    for name, collectives in groups.items():
        links.watch(name, collectives)
    with recording(model) as events:
        one_step(model, optimizer, batch)
    numel = sum(shard.layout.numel for shard in model.flat_shards())
    assert links.nbytes["in"] == sent(events, K.GATHER, K.REDUCE)
    assert links.nbytes["between"] == sent(events, K.COMBINE, K.SYNC)
    assert sent(events, K.COMBINE) == numel // 2 * 4
    assert sent(events, K.SYNC) == numel // 2 * (2 if bf16 else 4)
    assert links.nbytes["all"] < 1000


@distributed(world_size=4)
def test_frozen_parameters_are_sent_once(rank: int, world_size: int) -> None:
    """Frozen parameters are sent when the model is sharded, and not after a step."""
    batch = token_batches(1, world_size)[0][rank][0]
    for strategy, size in ((SHARED, 2), ("shard_optimizer", None)):
        net = make_net(tied=False)
        net.embed.requires_grad_(False)
        net.blocks.requires_grad_(False)
        for block in net.blocks[::2]:
            block.norm.requires_grad_(True)
        model = fsdpctl.shard_model(net, strategy, dp_shard_size=size)
        optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
        plain = make_net(tied=False)
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.5)
        with recording(model) as loaded:
            model.load_state_dict(plain.state_dict())
        whole = sum(shard.layout.numel for shard in model.flat_shards()) * 4
        assert sent(loaded, K.SYNC) == whole // (size or 1)
        with recording(model) as stepped:
            one_step(model, optimizer, batch)
        trained = sum(s.layout.numel for s in model.flat_shards() if s.trainable) * 4
        assert sent(stepped, K.SYNC) == trained // (size or 1) < whole // (size or 1)
        units = {event.unit for event in stepped if event.kind is K.SYNC}
        assert units == {"root", "head", "blocks.0", "blocks.2", "blocks.4"}
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(batch), plain(batch))
        model.check_replicas()


@distributed(world_size=4)
def test_a_rank_has_a_quarter_of_the_masters_and_half_of_the_parameters(rank, world_size):
    model = sharded(SHARED, precision=fsdpctl.Precision(torch.bfloat16))
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
    one_step(model, optimizer, token_batches(1, world_size)[0][rank][0])
    assert model.shard_memory_bytes() * 4 == model.replicated_memory_bytes()
    buffers = [buffer for unit in model._runtime.units.values() for buffer in unit.buffers]
    assert sum(each.param_shard.nbytes for each in buffers) * 4 == model.replicated_memory_bytes()
    half = model.replicated_memory_bytes() // 2
    assert optimizer.memory_bytes() <= half + 4 * len(optimizer.spans)
    spans = [
        [(span.start, span.stop) for span in (shard.owned_span, shard.span, shard.saved_span)]
        for shard in model.flat_shards()
    ]
    for of_ranks in zip(*model.collectives.all_gather_values(spans), strict=True):
        owned = sorted(tuple(span) for span, *_ in of_ranks)
        assert all(span == batch == written for span, batch, written in of_ranks)
        assert [start for start, _ in owned[1:]] == [stop for _, stop in owned[:-1]]
