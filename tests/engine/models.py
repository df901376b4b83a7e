"""Small modules with awkward shapes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.plan.strategy import STRATEGIES

WIDE = 401  # a vocabulary whose embedding has 30 times the parameters of a block


class OddBlock(nn.Module):
    """A residual block with sizes that no alignment divides: 7x13 matrices, vectors, a scalar."""

    def __init__(self, width: int = 13, hidden: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))
        return out


class OddNet(nn.Module):
    """Embedding, blocks, norm and head; the head may share the embedding's weight."""

    def __init__(self, *, tied: bool, num_blocks: int = 5, vocab: int = 17) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 13)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def make_net(*, tied: bool, dtype: torch.dtype = torch.float32, vocab: int = 17) -> OddNet:
    """Return the same network in every process."""
    torch.manual_seed(0)
    return OddNet(tied=tied, vocab=vocab).to(dtype)


def sharded(
    strategy: str, *, tied: bool = True, dtype: torch.dtype = torch.float32, **more: Any
) -> ShardedModel:
    """Shard the network over four ranks, in two replicas if the strategy has replicas."""
    size = 2 if STRATEGIES[strategy].replicates else None
    return shard_model(make_net(tied=tied, dtype=dtype), strategy, dp_shard_size=size, **more)


def next_token_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token."""
    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def token_batches(steps: int, ranks: int, micro_steps: int = 1) -> list[list[list[Tensor]]]:
    """Return different tokens for every step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> Tensor:
        return torch.randint(0, 17, (3, 6), generator=generator)

    return [[[batch() for _ in range(micro_steps)] for _ in range(ranks)] for _ in range(steps)]


def one_step(
    model: ShardedModel, optimizer: torch.optim.Optimizer, batch: Tensor,
    loss: Callable[[nn.Module, Tensor], Tensor] = next_token_loss,
) -> None:  # fmt: skip
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def gradients_beside(
    model: ShardedModel, whole: Mapping[str, Tensor | None]
) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yield this rank's reduced gradients, the same elements of full gradients, and the name."""
    for shard in model.flat_shards():
        for piece in shard.param_slices():
            values, grad, span = whole[piece.param.name], shard.grad, piece.in_param
            assert values is not None
            assert grad is not None
            expected = values.flatten()[span.start : span.stop]
            yield shard.view(grad, piece.in_flat), expected, piece.param.name


def run_window(model: ShardedModel, batches: Sequence[Tensor], reduces: Sequence[bool]) -> None:
    """Run a backward for each entry of `reduces`: whether it reduces gradients, or holds them."""
    for reduce, batch in zip(reduces, batches, strict=False):
        with nullcontext() if reduce else model.no_sync():
            next_token_loss(model, batch).backward()
