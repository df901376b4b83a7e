"""Behavior of sharded models in users' modules and loops."""

import gc
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.build import Sharding
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.errors import EngineError, UsageError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.schedule import EventKind
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed, in_turn
from tests.engine.events import recording
from tests.engine.models import (
    OddBlock,
    gradients_beside,
    make_net,
    next_token_loss,
    one_step,
    token_batches,
)
from tests.engine.odd import Leading, Stack, Wayward, square_loss
from tests.engine.test_failures import as_tensor
from tests.engine.test_parity import largest_difference
from tests.reference import train_reference


@distributed(world_size=2)
def test_a_parameter_keeps_its_identity_name_and_shape(rank: int, world_size: int) -> None:
    net = make_net(tied=True)
    before = {name: (id(param), param.shape) for name, param in net.named_parameters()}
    model = shard_model(net, "full_shard")
    next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    assert {n: (id(p), p.shape) for n, p in model.named_parameters()} == before
    assert net.head.weight is net.embed.weight


@distributed(world_size=2)
def test_a_parameter_at_rest_reads_nan_and_refuses_writes(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    param = dict(model.named_parameters())["blocks.0.up.weight"]
    assert param.isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError, match="more than one element"):
        param.add_(1)


@distributed(world_size=2)
def test_unsharded_parameters_are_views_of_one_buffer(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    seen: list[set[int]] = []
    block = model.module.get_submodule("blocks.0")
    block.register_forward_pre_hook(
        lambda *_: seen.append({p.untyped_storage().data_ptr() for p in block.parameters()})
    )
    model(token_batches(1, world_size)[0][rank][0])
    assert len(seen[0]) == 1


@distributed(world_size=2)
@in_turn(order=[[0, 1, 2, 3], [0, 1, 0, 1, 2, 3]])
def test_several_backwards_and_several_forwards_add_up(rank, world_size, order):
    """Run two backwards of a graph; two forwards, then two backwards; two forwards in a loss."""

    def twice(module: nn.Module) -> None:
        loss = square_loss(module, ones)
        loss.backward(retain_graph=True)
        loss.backward()

    def one_by_one(module: nn.Module) -> None:
        first, second = square_loss(module, ones), square_loss(module, 2 * ones)
        first.backward()
        second.backward()

    def together(module: nn.Module) -> None:
        (square_loss(module, ones) + square_loss(module, 2 * ones)).backward()

    ones = torch.ones(4, 13)
    for strategy in ("no_shard", "shard_grad_op", "full_shard"):
        for backwards in (twice, one_by_one, together):
            plain = Wayward(order)
            backwards(plain)
            model = shard_model(Wayward(order), strategy)
            backwards(model)
            grads = {name: p.grad for name, p in plain.named_parameters()}
            for ours, theirs, _ in gradients_beside(model, grads):
                assert torch.allclose(ours, theirs, atol=1e-7)


@distributed(world_size=2)
def test_one_rank_may_train_nothing_in_a_window(rank: int, world_size: int) -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = module(x.requires_grad_()).sum()
        return total

    inputs = [torch.full((4, 13), -1.0), torch.full((4, 13), 1.0)]  # one per rank
    expected = train_reference(Stack(Leading, Leading), loss, [[[x] for x in inputs]] * 2)
    model = shard_model(Stack(Leading, Leading), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    with model.no_sync():
        loss(model, inputs[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss(model, inputs[rank]).backward()
    optimizer.step()
    assert largest_difference(model.state_dict(), expected) == 0.0


@distributed(world_size=2)
def test_a_unit_called_inside_another_that_shares_its_memory_is_an_error(rank, world_size):
    net = Wayward([2])
    outer, inner = net.blocks[2], net.blocks[0]
    plain = outer.forward
    outer.forward = lambda x: plain(inner(x))
    with pytest.raises(EngineError, match=r"blocks\.0 is called inside blocks\.2"):
        shard_model(net, "full_shard")(torch.ones(4, 13))


@distributed(world_size=2)
def test_evaluation_between_forward_and_backward_changes_nothing(rank, world_size):
    batch = token_batches(1, world_size)[0][rank][0]
    plain = shard_model(make_net(tied=False), "full_shard")
    next_token_loss(plain, batch).backward()
    model = shard_model(make_net(tied=False), "full_shard")
    loss = next_token_loss(model, batch)
    with torch.no_grad():
        model(batch)
    loss.backward()
    for ours, theirs in zip(model.flat_shards(), plain.flat_shards(), strict=True):
        assert torch.equal(as_tensor(ours.grad), as_tensor(theirs.grad))


class _HidingBlock(OddBlock):
    def forward(self, x: Tensor) -> Tensor:
        return SimpleNamespace(value=super().forward(x))  # type: ignore[return-value]


class _HidingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_HidingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).value
        return x


@distributed(world_size=2)
def test_an_output_that_hides_its_tensors_is_an_error_not_a_wrong_result(rank, world_size):
    model = shard_model(_HidingNet(), "full_shard")
    loss = square_loss(model, torch.randn(4, 13))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@distributed(world_size=2)
def test_padding_stays_zero(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=True), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in token_batches(5, world_size):
        one_step(model, optimizer, of_ranks[rank][0])
    for shard in model.flat_shards():
        for gap in shard.layout.padding:
            inside = gap.intersect(shard.span)
            if inside is not None:
                assert not shard.view(shard.master, inside).any()


@distributed(world_size=2)
def test_prefetch_follows_the_actual_order_of_units_after_one_warning(rank, world_size):
    model = shard_model(Wayward([3, 2, 1, 0]), "full_shard")
    optimizer = ShardedAdamW(model, lr=1e-2)
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught, recording(model) as trace:
            warnings.simplefilter("always")
            square_loss(model, torch.randn(4, 13)).backward()
        assert len(caught) == (step == 0)
        optimizer.step()
        optimizer.zero_grad()
    assert model._runtime.schedule.order.forward == ("blocks.3", "blocks.2", "blocks.1", "blocks.0")
    kinds = (EventKind.GATHER, EventKind.FREE)
    gathers = [(event.kind, event.unit) for event in trace if event.kind in kinds]
    second = gathers.index((EventKind.GATHER, "blocks.2"))
    assert second < gathers.index((EventKind.FREE, "blocks.3"))


@distributed(world_size=2)
@in_turn(strategy=sorted(STRATEGIES), share_memory=[False, True])
def test_a_model_that_nothing_refers_to_is_freed(rank, world_size, strategy, share_memory):
    model = shard_model(make_net(tied=True), Sharding(strategy, share_memory=share_memory))
    next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    refs = [weakref.ref(each) for each in (model, model.module, *model.parameters())]
    del model
    gc.collect()
    assert [each() for each in refs] == [None] * len(refs)


@distributed(world_size=2)
def test_syncing_without_gradients_is_an_error(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=True), "full_shard")
    with pytest.raises(EngineError, match="call backward first"):
        model.sync_gradients()


def test_an_owner_map_with_another_strategy_is_an_error():
    with pytest.raises(UsageError, match="only valid with shard_optimizer"):
        shard_model(make_net(tied=True), "full_shard", owner_map="balanced")


@distributed(world_size=2)
@in_turn(param_dtype=[None, torch.bfloat16])
def test_nothing_is_left_in_the_padding_of_unsharded_gradients(rank, world_size, param_dtype):
    precision = Precision(param_dtype=param_dtype)
    model = shard_model(make_net(tied=False), "no_shard", precision=precision)
    for of_ranks in token_batches(3, world_size):
        next_token_loss(model, of_ranks[rank][0]).backward()
        gradients = [each.grad for each in model.flat_shards() if each.grad is not None]
        assert all(each.isfinite().all() for each in gradients)
        torch._foreach_mul_(gradients, float("nan"))
        del gradients
        model.drop_gradients()


@pytest.mark.slow
@distributed(world_size=4)
@in_turn(called=[True, False], strategy__owners=[
    ("shard_optimizer", "even"), ("shard_optimizer", "round_robin"),
    ("hybrid_shard_optimizer", "even"),
])  # fmt: skip
def test_updates_that_arrive_late_change_nothing(rank, world_size, called, strategy, owners):
    """The first forward also detects a unit that is not called as a module."""
    results = []
    for overlaps in (False, True):
        net = make_net(tied=False)
        if not called:
            net.blocks[2] = Called(net.blocks[2])
        has_copies = STRATEGIES[strategy].replicates
        precision = Precision(torch.bfloat16 if called or not has_copies else None)
        sharding = Sharding(strategy, owner_map=owners, precision=precision)
        if has_copies:
            sharding = replace(sharding, dp_shard_size=2)
        model = shard_model(net, sharding)
        model.overlap_param_gather = overlaps
        optimizer = ShardedAdamW(model, lr=1e-2)
        for number, of_ranks in enumerate(token_batches(4, world_size)):
            one_step(model, optimizer, of_ranks[rank][0])
            if number == 0 and has_copies:
                model.prefetch_forward_params()
            if number == 1:
                model.check_replicas()
            if number == 2:
                with torch.no_grad():
                    next_token_loss(model, of_ranks[rank][0])
        assert any(model._runtime.param_sync._arriving.values()) == overlaps
        results.append(model.state_dict())
    assert largest_difference(*results) == 0.0


class Called(nn.Module):
    """A module that calls its children by `.forward`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block.forward(x)


class OfOne(nn.Sequential):
    """A module that calls a layer of a unit, but not the unit: nothing gathers it."""

    def forward(self, x):
        return self[1](self.get_submodule("0.0")(x))


@distributed(world_size=2)
def test_a_parameter_of_one_element_is_recognized_at_rest(rank: int, world_size: int) -> None:
    net = OfOne(nn.Sequential(nn.Linear(1, 1, bias=False)), nn.Linear(1, 3))
    model = shard_model(net, "full_shard", units=[nn.Sequential, nn.Linear])
    with pytest.raises(EngineError, match="has no weights between steps"):
        net.get_submodule("0.0").state_dict()
    with pytest.raises(EngineError, match="its weight, which is not gathered"):
        model(torch.ones(2, 1))
