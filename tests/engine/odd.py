"""Modules that use their parameters in every way that a sharded model supports."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpctl.config.model import LoraConfig
from fsdpctl.engine.blocks import checkpoint_block, checkpoint_blocks
from fsdpctl.engine.offloaded_inputs import HostInputs
from fsdpctl.models.lora import LoraLinear
from fsdpctl.models.quantized import NF4, FrozenLinear
from fsdpctl.plan.recomputation import block_checkpointing
from tests.engine.models import OddBlock, OddNet, next_token_loss, token_batches

Batches = list[list[list[Tensor]]]  # [step][rank][micro-batch]
USED = 0.5  # inputs whose first element is larger use the spare matrix


class Spare(OddBlock):
    """A block with a matrix that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(13, 13)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.add(self.spare(out)) if self.is_used(x) else out

    def is_used(self, x: Tensor) -> bool:
        return float(x.detach()[0, 0]) > USED


class Never(Spare):
    """A block with a matrix that no input uses."""

    def is_used(self, x: Tensor) -> bool:
        return False


class Adapted(OddBlock):
    """A frozen block with two small trained matrices, as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down_a, self.down_b = nn.Linear(13, 3), nn.Linear(3, 13)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).add(self.down_b(self.down_a(x)))


class Frozen(OddBlock):
    """A block without trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Detached(OddBlock):
    """A block that reads a parameter twice, once without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.scale.detach())


class TiedInside(OddBlock):
    """A block with two matrices that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.also_up = nn.Linear(13, 7)
        self.also_up.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).add(torch.tanh(self.also_up(x)).sum(-1, keepdim=True))


class Buffered(OddBlock):
    """A block that multiplies by a buffer, which training does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 13))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.gain, Tensor)
        return super().forward(x) * self.gain.to(x.dtype)


class InPlace(OddBlock):
    """A block that writes to its input and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x


class Leading(Spare):
    """A frozen block with a trained spare matrix; if it is not used, the output has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.spare.requires_grad_(True)

    def is_used(self, x: Tensor) -> bool:
        return float(x.detach()[0, 0]) > 0


class Stack(nn.Module):
    """A sequence of four or more blocks."""

    def __init__(self, *blocks: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        of = blocks or (OddBlock,)
        kinds = [of[index % len(of)] for index in range(max(4, len(of)))]
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TiedAcross(Stack):
    """A stack in which two blocks share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.get_submodule("blocks.1.up"), self.get_submodule("blocks.3.up")
        second.weight = first.weight


class Wayward(nn.Module):
    """A module that runs its blocks in any `order`: twice, reversed, or not at all."""

    def __init__(self, order: list[int], *, checkpoints: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))
        self.order, self.checkpoints = order, checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            if self.checkpoints:
                reentrant = self.checkpoints == "reentrant"
                x = checkpoint(self.blocks[index], x, use_reentrant=reentrant)
            else:
                x = self.blocks[index](x)
        return x


class SideOutputs(Stack):
    """A stack that adds the output of the third block if the input's first element is positive."""

    def forward(self, x: Tensor) -> Tensor:
        side = self.blocks[2](x)
        uses = float(x.detach()[0, 0]) > 0
        for index in (0, 1, 3):
            x = self.blocks[index](x)
        return x.add(side) if uses else x


class PartlyReentrant(OddNet):
    """A network with two blocks that are checkpointed re-entrantly."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(tied=False, num_blocks=3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=True) if number != 1 else block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def checkpoint_all(modules: Iterable[nn.Module], mode: str, *, offload: bool) -> HostInputs:
    """Checkpoint blocks in the order of forward; `offload` their inputs to the host."""
    blocks = list(modules)
    return checkpoint_blocks(blocks, block_checkpointing(mode, None, len(blocks), offload=offload))


def recomputing(mode: str) -> nn.Module:
    """Return a stack with blocks as under `activation_checkpointing=MODE`."""
    net = Stack(OddBlock)
    for block in net.blocks:
        checkpoint_block(block, mode)
    return net


def token_net(*, tied: bool) -> OddNet:
    torch.manual_seed(0)
    return OddNet(tied=tied, num_blocks=3)


def frozen_loss(module: nn.Module, x: Tensor) -> Tensor:
    """Return `square_loss` of an input without a gradient."""
    dtype = next(module.parameters()).dtype
    loss: Tensor = module(x.to(dtype)).square().mean()
    return loss


def square_loss(module: nn.Module, x: Tensor) -> Tensor:
    dtype = next(module.parameters()).dtype
    loss: Tensor = module(x.to(dtype).requires_grad_()).square().mean()
    return loss


def float_batches(steps: int, ranks: int, micro_steps: int = 1) -> Batches:
    """Return different inputs for every step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(2)

    def batch() -> Tensor:
        return torch.randn(4, 13, generator=generator)

    return [[[batch() for _ in range(micro_steps)] for _ in range(ranks)] for _ in range(steps)]


def late_batches(steps: int, ranks: int, micro_steps: int = 1) -> Batches:
    """Return inputs with which all ranks use the spare matrix from the third step on."""
    batches = float_batches(steps, ranks, micro_steps)
    for step, of_ranks in enumerate(batches):
        for micro_batches in of_ranks:
            for batch in micro_batches:
                batch[0, 0] = 5.0 if step >= 2 else -5.0
    return batches


def freeze_below(net: OddNet) -> None:
    """Train only the last layers: backward does not reach the units before."""
    net.embed.requires_grad_(False)
    net.blocks[:2].requires_grad_(False)
    net.blocks[2].norm.requires_grad_(False)


def freeze_all_but_vectors(net: OddNet) -> None:
    """Train a few elements of every unit, as with adapters."""
    for param in net.parameters():
        param.requires_grad_(param.ndim <= 1)


def partly_frozen(freeze: Callable[[OddNet], None]) -> OddNet:
    freeze(net := token_net(tied=False))
    return net


@torch.no_grad()
def in_four_bits() -> OddNet:
    """Return a network with adapters over frozen NF4 matrices; two blocks are recomputed."""
    net = token_net(tied=False)
    net.requires_grad_(False)
    for number, block in enumerate(net.blocks):
        for name, base in list(block.named_children()):
            if isinstance(base, nn.Linear):
                frozen = FrozenLinear(base, is_transposed=False)
                frozen.quantize(NF4)
                frozen.weight.copy_(NF4.quantize(base.weight))
                adapted = LoraLinear(frozen, LoraConfig(rank=2))
                for layer in (adapted.lora_A, adapted.lora_B):
                    layer.weight = nn.Parameter(torch.randn(layer.weight.shape) / 8)
                setattr(block, name, adapted)
        if number in (1, 2):
            checkpoint_block(block, ("full", "selective")[number - 1])
    return net


@dataclass(frozen=True)
class Kind:
    """A module, its data and its loss."""

    make: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Batches] = float_batches
    loss: Callable[[nn.Module, Tensor], Tensor] = square_loss


KINDS: dict[str, Kind] = {
    "odd shapes": Kind(lambda: token_net(tied=False), token_batches, next_token_loss),
    "tied embedding": Kind(lambda: token_net(tied=True), token_batches, next_token_loss),
    "frozen below": Kind(partial(partly_frozen, freeze_below), token_batches, next_token_loss),
    "little trained": Kind(
        partial(partly_frozen, freeze_all_but_vectors), token_batches, next_token_loss),
    "in four bits": Kind(in_four_bits, token_batches, next_token_loss),
    "mixed": Kind(lambda: Stack(TiedInside, InPlace, Frozen, Buffered, Detached)),
    "tied across": Kind(TiedAcross), "adapted": Kind(lambda: Stack(Adapted)),
    "never used": Kind(lambda: Stack(Never)), "used on some ranks": Kind(lambda: Stack(Spare)),
    "output used on some ranks": Kind(SideOutputs),
    "graph on some ranks": Kind(lambda: Stack(*[Leading] * 2, *[OddBlock] * 2), loss=frozen_loss),
    "used later": Kind(lambda: Stack(Spare), late_batches),
    "called twice": Kind(lambda: Wayward([0, 1, 0, 1, 2, 3])),
    "reordered": Kind(lambda: Wayward([3, 2, 1, 0])),
    "skipped": Kind(lambda: Wayward([2, 0, 3, 3])), "recomputed": Kind(lambda: recomputing("full")),
    "recomputed selectively": Kind(lambda: recomputing("selective")),
    "checkpointed outside": Kind(lambda: Wayward([0, 1, 2, 3], checkpoints="plain")),
    "checkpointed re-entrantly": Kind(lambda: Wayward([1, 0, 2, 3], checkpoints="reentrant")),
    "partly re-entrantly": Kind(PartlyReentrant, token_batches, next_token_loss),
}  # fmt: skip
