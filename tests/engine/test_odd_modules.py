"""Frozen, unused, shared or unusual parameters: equal to one process, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.step_plan import Prefetch
from tests.distributed import distributed, in_turn
from tests.engine.models import OddBlock, OddNet, next_token_loss, one_step, token_batches
from tests.engine.odd import Batches, Spare, Stack, TiedAcross, float_batches, square_loss
from tests.engine.test_parity import largest_difference
from tests.reference import Loss, train_reference


def difference(
    rank: int, make: Callable[[], nn.Module], batches: Batches, loss: Loss, strategy: str,
    **kwargs: Any,
) -> float:  # fmt: skip
    """Return the largest difference of weights between a sharded model and one process."""
    torch.manual_seed(0)
    expected = train_reference(make(), loss, batches)
    torch.manual_seed(0)
    model = shard_model(make(), strategy, **kwargs)
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        one_step(model, optimizer, of_ranks[rank][0], loss)
    return largest_difference(model.state_dict(), expected)


@distributed(world_size=2)
@in_turn(depth=[0, 2, 3])
def test_prefetch_changes_nothing_if_ranks_use_different_parameters(rank, world_size, depth):
    arguments = rank, lambda: Stack(Spare), float_batches(6, world_size), square_loss, "full_shard"
    assert difference(*arguments, prefetch=Prefetch(depth, depth)) == 0.0


class PassesThrough(OddBlock):
    """A block that also returns its second input, as with a shared position bias."""

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
    """A module with nested lists, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = ([OddBlock(), nn.Linear(13, 13)] for _ in range(3))
        self.layers = nn.ModuleList(map(nn.ModuleList, pairs))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer[1](layer[0](x)))  # type: ignore[index]
        return x


@distributed(world_size=2)
@in_turn(make=[WithBias, Nested], strategy=["full_shard", "shard_grad_op"])
def test_other_ways_to_build_modules(rank, world_size, strategy, make):
    assert difference(rank, make, float_batches(4, world_size), square_loss, strategy) == 0.0


class SideOutput(nn.Module):
    """A module whose loss needs a tensor that its forward does not return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> None:
        for block in self.blocks:
            x = block(x)
        self.kept = x.square().mean()


@distributed(world_size=2)
@in_turn(strategy=["no_shard", "full_shard"])
def test_a_loss_that_does_not_come_from_the_output(rank, world_size, strategy):
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        module(x)
        inner = module.module if isinstance(module, ShardedModel) else module
        assert isinstance(inner, SideOutput)
        result, inner.kept = inner.kept, torch.zeros(())  # else the graph would keep the module
        return result

    assert difference(rank, SideOutput, float_batches(3, world_size), loss, strategy) == 0.0


@distributed(world_size=2)
def test_zero_grad_of_the_model_drops_all_gradients(rank: int, world_size: int) -> None:
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
    assert shard_model(module, "full_shard").state_dict()["count"].tolist() == [0, 7]


class NormedEmbedding(nn.Embedding):
    """An embedding with a norm, whose weight backward reads."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__(num, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.norm(super().forward(tokens))
        return out


class Speaker(OddNet):
    """A model with the methods of transformers, whose embedding has a norm."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        torch.manual_seed(1)
        self.embed = NormedEmbedding(*self.embed.weight.shape)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


class Speechless(OddNet):
    """A model with the methods of transformers, but without embeddings, as for images."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


class ByForward(Stack):
    """A module that calls its blocks without their hooks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class InParts(Stack):
    """A module that calls a part of a block."""

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.blocks[1].up(x)  # type: ignore[operator]
        return part


class Rescales(Stack):
    """A module that writes to a block's weight before it calls the block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].up.weight.div_(2)  # type: ignore[operator, union-attr]
        return super().forward(x)


@distributed(world_size=2)
@in_turn(make=[Speaker, Speechless])
def test_embeddings_of_every_kind_equal_one_process(rank, world_size, make):
    batches = token_batches(2, world_size)
    assert difference(rank, make, batches, next_token_loss, "full_shard") == 0.0


@distributed(world_size=2)
@in_turn(kind__error=[
    (ByForward, r"blocks.0.\w+ computes with its weight, which is not gathered"),
    (InParts, "blocks.1.up computes with its weight"),
    (Rescales, "writes to its own parameters in forward"),
])  # fmt: skip
def test_parameters_that_are_not_gathered_are_named(rank, world_size, kind, error):
    model = shard_model(kind(OddBlock), "full_shard")
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(EngineError, match=error):
            model(float_batches(1, 1)[0][0][0])


@distributed(world_size=2)
def test_only_the_first_forward_is_watched(rank: int, world_size: int) -> None:
    model = shard_model(Stack(OddBlock), "full_shard")
    leaf = model.module.get_submodule("blocks.1.up")
    assert leaf._forward_pre_hooks
    model(float_batches(1, 1)[0][0][0])
    assert not leaf._forward_pre_hooks
