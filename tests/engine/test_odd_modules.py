"""Parameters that are frozen, unused, shared or oddly placed: equal to one process, or an error."""

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.shard import shard_model
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.schedule import Prefetch
from tests.distributed import distributed
from tests.engine.models import OddBlock
from tests.engine.odd import Batches, Spare, Stack, TiedAcross, float_batches, square_loss
from tests.engine.test_parity import largest_difference
from tests.reference import train_reference


def train(model: ShardedModel, rank: int, batches: Batches) -> None:
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        square_loss(model, of_ranks[rank][0]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("depth", [0, 2, 3])
@distributed(world_size=2)
def test_prefetch_changes_nothing_where_ranks_use_different_parameters(
    rank: int, world_size: int, depth: int
) -> None:
    batches = float_batches(6, world_size)
    expected = train_reference(Stack(Spare), square_loss, batches)
    model = shard_model(Stack(Spare), "full_shard", prefetch=Prefetch(depth, depth))
    train(model, rank, batches)
    assert largest_difference(model.state_dict(), expected) == 0.0


class PassesThrough(OddBlock):
    """Hands its second input on, as models with a shared position bias do."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, bias = pair
        return super().forward(x) + bias, bias


class WithBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Linear(13, 13)
        self.blocks = nn.ModuleList(PassesThrough() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pair = x, self.bias(x)
        for block in self.blocks:
            pair = block(pair)
        return pair[0].add(pair[1])


class Nested(nn.Module):
    """Lists of lists, whose inner ones are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleList([OddBlock(), nn.Linear(13, 13)]) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer[1](layer[0](x)))  # type: ignore[index]
        return x


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("make", [WithBias, Nested])
@distributed(world_size=2)
def test_other_ways_to_build_modules(
    rank: int, world_size: int, strategy: str, make: type[nn.Module]
) -> None:
    batches = float_batches(4, world_size)
    expected = train_reference(make(), square_loss, batches)
    model = shard_model(make(), strategy)
    train(model, rank, batches)
    assert largest_difference(model.state_dict(), expected) == 0.0


class SideOutput(nn.Module):
    """What its loss needs does not come out of its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> None:
        for block in self.blocks:
            x = block(x)
        self.kept = x.square().mean()


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@distributed(world_size=2)
def test_a_loss_that_does_not_come_from_the_output(
    rank: int, world_size: int, strategy: str
) -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        module(x)
        inner = module.module if isinstance(module, ShardedModel) else module
        assert isinstance(inner, SideOutput)
        return inner.kept

    batches = float_batches(3, world_size)
    expected = train_reference(SideOutput(), loss, batches)
    model = shard_model(SideOutput(), strategy)
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        loss(model, of_ranks[rank][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model.state_dict(), expected) == 0.0


@distributed(world_size=2)
def test_zero_grad_of_the_model_forgets(rank: int, world_size: int) -> None:
    model = shard_model(TiedAcross(), "full_shard")
    x = float_batches(1, world_size)[0][rank][0]
    square_loss(model, x).backward()
    first = [shard.grad.clone() for shard in model.flat_shards() if shard.grad is not None]
    model.zero_grad()
    square_loss(model, x).backward()
    second = [shard.grad for shard in model.flat_shards() if shard.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parameters_that_are_not_real_numbers_are_refused():
    module = nn.Module()
    module.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(EngineError, match="phase is torch.complex64"):
        shard_model(module, "no_shard")


@distributed(world_size=2)
def test_buffers_of_any_dtype_become_rank_zeros(rank: int, world_size: int) -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("count", torch.tensor([rank, 7], dtype=torch.int16))
    model = shard_model(module, "full_shard")
    assert model.state_dict()["count"].tolist() == [0, 7]
