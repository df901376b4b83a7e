"""Every strategy equals one process that sees all ranks' data."""

import pytest
import torch
from torch import Tensor

from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import shard_model
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import record_step
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.matrix import matrix
from tests.reference import train_reference

STRATEGY_NAMES = list(STRATEGIES)


def train(model: ShardedModel, rank: int, batches: list[list[list[Tensor]]], *, last: bool) -> None:
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        *held, final = of_ranks[rank]
        for batch in held:
            if last:
                with model.no_sync():
                    (next_token_loss(model, batch) / len(of_ranks[rank])).backward()
            else:
                (next_token_loss(model, batch) / len(of_ranks[rank])).backward()
        (next_token_loss(model, final) / len(of_ranks[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@matrix(strategy=STRATEGY_NAMES, tied=[False, True], world_size=[1, 2, 3, 4])
@distributed()
def test_equals_one_process_bit_for_bit(
    rank: int, world_size: int, strategy: str, tied: bool
) -> None:
    batches = token_batches(5, world_size)
    expected = train_reference(make_net(tied=tied), next_token_loss, batches)
    model = shard_model(make_net(tied=tied), strategy)
    train(model, rank, batches, last=False)
    assert largest_difference(model.state_dict(), expected) == 0.0


@matrix(strategy=STRATEGY_NAMES, world_size=[2, 3])
@distributed()
def test_accumulating_without_reduction_equals_one_process(
    rank: int, world_size: int, strategy: str
) -> None:
    batches = token_batches(5, world_size, micro_steps=3)
    expected = train_reference(make_net(tied=False), next_token_loss, batches)
    model = shard_model(make_net(tied=False), strategy)
    train(model, rank, batches, last=True)
    assert largest_difference(model.state_dict(), expected) == 0.0


@matrix(tied=[False, True], strategy=STRATEGY_NAMES)
@distributed(world_size=3)
def test_reducing_every_micro_step_equals_one_process_in_float64(
    rank: int, world_size: int, tied: bool, strategy: str
) -> None:
    batches = token_batches(5, world_size, micro_steps=3)
    expected = train_reference(make_net(tied=tied, dtype=torch.float64), next_token_loss, batches)
    model = shard_model(make_net(tied=tied, dtype=torch.float64), strategy)
    train(model, rank, batches, last=False)
    assert largest_difference(model.state_dict(), expected) <= 1e-12


@matrix(strategy=STRATEGY_NAMES, world_size=[2, 3, 4])
@distributed()
def test_clipping_equals_one_process(rank: int, world_size: int, strategy: str) -> None:
    batches = token_batches(5, world_size)
    expected = train_reference(make_net(tied=True), next_token_loss, batches, max_norm=0.05)
    model = shard_model(make_net(tied=True), strategy)
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        next_token_loss(model, of_ranks[rank][0]).backward()
        record = record_step(
            model,
            loss_sum=torch.zeros(()),
            tokens=torch.tensor(15),
            nominal_tokens=15 * world_size,
            max_grad_norm=0.05,
        )
        assert record.figures().grad_norm > 0.05
        optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
        optimizer.zero_grad()
    assert largest_difference(model.state_dict(), expected) <= 1e-6


HYBRIDS = ["hybrid_shard", "hybrid_shard_grad_op"]


@matrix(strategy=HYBRIDS, dp_shard_size=[1, 2], tied=[False, True])
@distributed(world_size=4)
def test_hybrid_equals_one_process_in_float64(
    rank: int, world_size: int, strategy: str, tied: bool, dp_shard_size: int
) -> None:
    batches = token_batches(5, world_size)
    expected = train_reference(make_net(tied=tied, dtype=torch.float64), next_token_loss, batches)
    net = make_net(tied=tied, dtype=torch.float64)
    model = shard_model(net, strategy, dp_shard_size=dp_shard_size)
    train(model, rank, batches, last=False)
    assert largest_difference(model.state_dict(), expected) <= 1e-12


@matrix(owner_map=["round_robin", "contiguous", "balanced"], world_size=[2, 3, 4])
@distributed()
def test_owner_maps_equal_one_process_bit_for_bit(
    rank: int, world_size: int, owner_map: str
) -> None:
    batches = token_batches(5, world_size, micro_steps=3)
    expected = train_reference(make_net(tied=True), next_token_loss, batches)
    model = shard_model(make_net(tied=True), "shard_optimizer", owner_map=owner_map)
    train(model, rank, batches, last=True)
    assert largest_difference(model.state_dict(), expected) == 0.0


@pytest.mark.parametrize("strategy", ["no_shard", "shard_optimizer", "full_shard"])
@distributed(world_size=2)
def test_bf16_compute_equals_other_strategies_bit_for_bit(
    rank: int, world_size: int, strategy: str
) -> None:
    batches = token_batches(5, world_size)
    precision = Precision(param_dtype=torch.bfloat16)
    expected = shard_model(make_net(tied=False), "shard_grad_op", precision=precision)
    train(expected, rank, batches, last=False)
    model = shard_model(make_net(tied=False), strategy, precision=precision)
    train(model, rank, batches, last=False)
    assert {shard.master.dtype for shard in model.flat_shards()} == {torch.float32}
    assert largest_difference(model.state_dict(), expected.state_dict()) == 0.0


@distributed(world_size=2)
def test_ranks_with_different_weights_become_rank_zeros_model(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    net = make_net(tied=True)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(rank)
    model = shard_model(net, "full_shard")
    assert largest_difference(model.state_dict(), make_net(tied=True).state_dict()) == 0.0
