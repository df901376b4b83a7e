"""Reads, copies and changes of the parameters of a sharded model."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fsdpctl
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.errors import EngineError
from tests.distributed import distributed, in_turn
from tests.engine.models import OddNet, make_net, next_token_loss, token_batches
from tests.engine.test_parity import largest_difference


def clip(model: fsdpctl.ShardedModel) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read(model: fsdpctl.ShardedModel) -> None:
    _ = [param.grad for param in model.parameters()]


@distributed(world_size=2)
@in_turn(
    strategy=["full_shard", "shard_optimizer", "no_shard"], held=[False, True], use=[clip, read]
)
def test_reading_a_gradient_of_a_parameter_raises_an_error(rank, world_size, strategy, held, use):
    model = fsdpctl.shard_model(make_net(tied=True), strategy)
    optimizer = fsdpctl.ShardedAdamW(model)
    for of_ranks in token_batches(2, world_size):
        use(model)  # without gradients, it has nothing to clip
        batch = of_ranks[rank][0]
        if held:
            with model.no_sync():
                next_token_loss(model, batch).backward()
            with pytest.raises(EngineError, match="fsdpctl.clip_grad_norm_"):
                use(model)
        next_token_loss(model, batch).backward()
        with pytest.raises(EngineError, match="fsdpctl.clip_grad_norm_"):
            use(model)
        assert torch.nn.utils.clip_grad_norm_(model.flat_parameters(), 1e9) > 0
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_are_plain_after_unwrap():
    net = make_net(tied=True)
    before = list(net.parameters())
    plain = fsdpctl.shard_model(net, "full_shard").unwrap()
    assert all(ours is theirs for ours, theirs in zip(before, plain.parameters(), strict=True))
    assert {type(param) for param in plain.parameters()} == {nn.Parameter}
    assert not any(vars(param) for param in plain.parameters())
    next_token_loss(plain, token_batches(1, 1)[0][0][0]).backward()
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 0


def test_copies_of_full_parameters_are_plain():
    net = make_net(tied=True)
    model = fsdpctl.shard_model(net, "full_shard")
    next_token_loss(model, token_batches(1, 1)[0][0][0]).backward()
    with model.full_parameters():
        copied = copy.deepcopy(net.norm)
        pickled = pickle.loads(pickle.dumps(net.norm.weight))
    assert {type(param) for param in (*copied.parameters(), pickled)} == {nn.Parameter}
    assert all(param.grad is None for param in (*copied.parameters(), pickled))


def test_parameters_keep_their_own_class():
    class Named(nn.Parameter):
        pass

    net = make_net(tied=True)
    net.norm.weight = Named(net.norm.weight.detach())
    model = fsdpctl.shard_model(net, "full_shard")
    assert isinstance(net.norm.weight, Named)
    model.unwrap()
    assert type(net.norm.weight) is Named


@pytest.mark.slow
@distributed(world_size=2)
def test_recompilation_between_micro_batches_reads_all_parameters(rank, world_size):
    nets = make_net(tied=False), make_net(tied=False)
    models = [fsdpctl.shard_model(net, "full_shard") for net in nets]
    for block in nets[0].blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    batch = token_batches(1, world_size)[0][rank][0]
    for model in models:
        optimizer = fsdpctl.ShardedAdamW(model)
        for length in (batch.shape[1], batch.shape[1] - 2):
            with model.no_sync():
                next_token_loss(model, batch[:, :length]).backward()
        optimizer.step()
    assert largest_difference(*(model.state_dict() for model in models)) <= 1e-6


@distributed(world_size=2)
@in_turn(trained=[True, False], strategy=["full_shard", "shard_optimizer"])
def test_requires_grad_cannot_change_after_sharding(rank, world_size, trained, strategy):
    net = make_net(tied=False)
    net.blocks[1].requires_grad_(not trained)
    model = fsdpctl.shard_model(net, strategy)
    batch = token_batches(1, world_size)[0][rank][0]
    next_token_loss(model, batch).backward()
    net.blocks[1].requires_grad_(trained)
    with pytest.raises(EngineError, match=rf"blocks.1.*: requires_grad was {not trained} when"):
        model(batch)
    net.blocks[1].requires_grad_(not trained)
    next_token_loss(model, batch).backward()


def test_sums_in_float16_are_refused():
    with pytest.raises(EngineError, match="overflow at 65504"):
        fsdpctl.Precision(reduce_dtype=torch.float16)


def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(EngineError, match="on cuda:1 and the current device is cuda:0"):
        NcclCollectives(torch.device("cuda", 1))


def compiled_after(net: OddNet) -> None:
    net.blocks[1].compile(backend="eager")


def replaced(net: OddNet) -> None:
    net.norm.weight = nn.Parameter(torch.ones_like(net.norm.weight))


@distributed(world_size=2)
@in_turn(change__error=[
    (compiled_after, r"compile its forward"),
    (replaced, "norm.weight is not the parameter that was sharded"),
])  # fmt: skip
def test_computing_with_wrong_values_is_rejected(rank, world_size, change, error):
    net = make_net(tied=False)
    model = fsdpctl.shard_model(net, "full_shard")
    batch = token_batches(1, world_size)[0][rank][0]
    model(batch)
    change(net)
    with pytest.raises(EngineError, match=error):
        model(batch)


@distributed(world_size=2)
@in_turn(strategy=["full_shard", "no_shard"])
def test_a_copy_is_an_independent_model(rank: int, world_size: int, strategy: str) -> None:
    net = make_net(tied=False)
    model = fsdpctl.shard_model(net, strategy)
    optimizer = fsdpctl.ShardedAdamW(model)
    with pytest.raises(EngineError, match="within model.full_parameters"):
        copy.deepcopy(net)
    with model.full_parameters():
        copied = copy.deepcopy(net)
    batch = token_batches(1, world_size)[0][rank][0]
    if rank == 0:
        next_token_loss(copied, batch).backward()
    next_token_loss(model, batch).backward()
    optimizer.step()
    assert {type(param) for param in copied.parameters()} == {nn.Parameter}
    if rank == 0:
        assert torch.nn.utils.clip_grad_norm_(copied.parameters(), 1.0) > 0


def test_use_after_unwrap_raises_an_error():
    model = fsdpctl.shard_model(make_net(tied=False), "full_shard")
    optimizer = fsdpctl.ShardedAdamW(model)
    model.unwrap()
    for use in (model.state_dict, optimizer.step, model.no_sync().__enter__):
        with pytest.raises(EngineError, match="unwrap.. has ended"):
            use()


@distributed(world_size=2)
@in_turn(kind__strategy__refused=[
    ("LBFGS", "full_shard", True), ("LBFGS", "no_shard", False),
    ("Adafactor", "no_shard", True), ("SGD", "full_shard", False),
])  # fmt: skip
def test_optimizers_that_are_not_elementwise_are_refused(rank, world_size, kind, strategy, refused):
    model = fsdpctl.shard_model(make_net(tied=True), strategy)
    optimizer = getattr(torch.optim, kind)(model.flat_parameters())
    batch = token_batches(1, world_size)[0][rank][0]

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = next_token_loss(model, batch)
        loss.backward()
        return loss

    if refused:
        with pytest.raises(EngineError, match="more than one element at a time"):
            optimizer.step(closure)
    else:
        optimizer.step(closure)
