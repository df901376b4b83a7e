"""Frozen parameters have no masters, no gradients and no unneeded gathers."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.schedule import EventKind as K
from fsdpctl.plan.step_plan import Prefetch
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed, in_turn
from tests.engine.events import recording
from tests.engine.models import OddNet, make_net, next_token_loss, token_batches
from tests.engine.nccl import nccl_path
from tests.engine.odd import freeze_all_but_vectors, freeze_below
from tests.engine.test_trace import planned_events, recorded_events
from tests.matrix import WHOLE, cases


def freeze_blocks_and_embedding(net: OddNet) -> None:
    net.embed.requires_grad_(False)
    net.blocks.requires_grad_(False)


FREEZES: list[Callable[[OddNet], None]] = [
    freeze_below, freeze_all_but_vectors, freeze_blocks_and_embedding,
]  # fmt: skip
PRECISIONS = [
    Precision(), Precision(torch.bfloat16), Precision(torch.bfloat16, torch.bfloat16),
]  # fmt: skip


@pytest.mark.slow
@WHOLE
@distributed(world_size=2, timeout=120)
def test_events_bytes_and_buffers_equal_the_plan(rank: int, world_size: int, whole: bool) -> None:
    for freeze, strategy, precision, prefetch in cases(
        FREEZES, list(STRATEGIES), PRECISIONS, [(0, 0), (1, 1), (0, 2)], whole=whole
    ):
        net, depth = make_net(tied=False), Prefetch(*prefetch)
        freeze(net)
        model = shard_model(net, strategy, prefetch=depth, precision=precision)
        case = (freeze, strategy, precision, prefetch)
        assert recorded_events(model, rank) == planned_events(model), case


@distributed(world_size=2)
def test_units_before_the_first_trained_one_are_gathered_once(rank: int, world_size: int) -> None:
    for strategy in ("full_shard", "shard_grad_op"):
        net = make_net(tied=False)
        freeze_below(net)
        model = shard_model(net, strategy)
        with recording(model) as events:
            next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
        for unit in ("embed", "blocks.0", "blocks.1"):
            of_unit = [each.kind for each in events if each.unit == unit and not each.buffer]
            assert of_unit == [K.GATHER, K.READY, K.FORWARD, K.FREE, K.LEAVE]


@distributed(world_size=4)
@in_turn(strategy=list(STRATEGIES))
def test_frozen_parameters_are_kept_once_in_the_compute_dtype(rank, world_size, strategy):
    net, plain = make_net(tied=False), make_net(tied=False)
    freeze_all_but_vectors(net)
    size = 2 if STRATEGIES[strategy].replicates else None
    model = shard_model(net, strategy, precision=Precision(torch.bfloat16), dp_shard_size=size)
    for shard in model.flat_shards():
        assert shard.dtype == (torch.float32 if shard.trainable else torch.bfloat16)
    buffers = [buffer for unit in model._runtime.units.values() for buffer in unit.buffers]
    for buffer in (each for each in buffers if not each.shard.trainable):
        part, master = buffer.param_shard.untyped_storage(), buffer.shard.master.untyped_storage()
        assert part.data_ptr() == master.data_ptr()
    state = model.state_dict()
    for name, param in plain.named_parameters():
        expected = param if param.ndim <= 1 else param.to(torch.bfloat16)
        assert torch.equal(state[name], expected.to(state[name].dtype)), name


@distributed(world_size=2)
def test_the_buffers_of_a_unit_are_one_launch_over_nccl(rank: int, world_size: int) -> None:
    launches: list[object] = []
    together = dist.distributed_c10d._coalescing_manager

    def counted(group: dist.ProcessGroup) -> AbstractContextManager[object]:
        launches.append(group)
        return together(group)

    with pytest.MonkeyPatch.context() as patch, nccl_path():
        net = make_net(tied=False)
        freeze_all_but_vectors(net)
        model = shard_model(net, "full_shard")
        patch.setattr(dist.distributed_c10d, "_coalescing_manager", counted)
        with recording(model) as events:
            loss = next_token_loss(model, token_batches(1, world_size)[0][rank][0])
        gathers = [each.unit for each in events if each.kind is K.GATHER]
    units = model._runtime.units
    assert len(launches) == sum(len(units[name].buffers) == 2 for name in gathers) > 0
    expected = next_token_loss(make_net(tied=False), token_batches(1, world_size)[0][rank][0])
    assert torch.equal(loss, expected)


@distributed(world_size=2)
def test_buffers_of_several_dtypes_are_gathered_over_nccl_too(rank: int, world_size: int) -> None:
    tokens = token_batches(1, world_size)[0][rank][0]
    net, plain = make_net(tied=False), make_net(tied=False)
    for each in (net, plain):
        freeze_all_but_vectors(each)
        for block in each.blocks:
            block.scale.data = block.scale.data.double()
    with nccl_path():
        model = shard_model(net, "full_shard")
        assert {len(unit.buffers) for unit in model._runtime.units.values()} == {1, 3}
        loss = next_token_loss(model, tokens)
    assert torch.equal(loss, next_token_loss(plain, tokens))
