"""A rank's part of a unit: what engines, optimizers, checkpoints and training share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsdpctl.comm.base import Collectives
from fsdpctl.comm.mesh import Mesh
from fsdpctl.comm.waits import Seconds
from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import FlatLayout, Piece, Span


class FlatShard:
    """Master weights of one flat buffer, as far as this rank holds them, and their gradient."""

    def __init__(
        self,
        unit: str,
        layout: FlatLayout,
        master: Tensor,
        *,
        held: Span,
        owned: Span,
        written: Span,
        num_owners: int = 1,
    ) -> None:
        """Wrap `master`.

        Args:
            unit: the unit it belongs to.
            layout: of the whole flat buffer.
            master: 1-D, the elements `held`.
            held: everything where masters are replicated, else `owned`.
            owned: the part whose gradient this rank reduces; norms count it.
            written: the part that this rank saves; replicas share the work.
            num_owners: how many ranks have the same `owned`, one in each copy.
        """
        self.unit = unit
        self.layout = layout
        self.held, self.owned, self.written = held, owned, written
        self.num_owners = num_owners
        self.is_replicated = held != owned  # every rank holds all of the masters
        self.param = nn.Parameter(master, requires_grad=layout.trainable)

    @property
    def master(self) -> Tensor:
        """The weights that the optimizer updates; 1-D, the elements `held`."""
        return self.param.detach()

    @property
    def dtype(self) -> torch.dtype:
        """That of the masters."""
        return self.param.dtype

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient, like `master`; None until there is one."""
        return self.param.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.param.grad = gradient

    @property
    def trainable(self) -> bool:
        """Whether its parameters are trained."""
        return self.param.requires_grad

    @property
    def owned_grad(self) -> Tensor | None:
        """The gradient of the owned elements."""
        if self.grad is None or not self.is_replicated:
            return self.grad
        start = self.owned.start - self.held.start
        return self.grad[start : start + self.owned.numel]

    def view(self, values: Tensor, span: Span) -> Tensor:
        """The elements `span` of the flat buffer in `values`, a tensor like `master`."""
        return values[span.start - self.held.start : span.stop - self.held.start]

    def written_pieces(self) -> tuple[Piece, ...]:
        """The parts of parameters that this rank saves."""
        return self.layout.pieces(self.written)

    def held_pieces(self) -> tuple[Piece, ...]:
        """The parts of parameters that `master` has."""
        return self.layout.pieces(self.held)


class Sharded(Protocol):
    """What the optimizer and the checkpoints need of a sharded model."""

    def flat_shards(self) -> tuple[FlatShard, ...]:
        """This rank's shards, in the same order on every rank."""
        ...

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """The module's buffers that belong into a checkpoint, by name."""
        ...

    def sync_gradients(self) -> None:
        """Reduce what has been held back; afterwards every shard has its gradient."""
        ...

    def absent_everywhere(self) -> frozenset[str]:
        """Names of the trainable parameters that had a gradient on no rank."""
        ...

    def broadcast_updated_params(self, *, trained_only: bool = False) -> None:
        """Let the next forward see what was written to the masters, here and by other ranks.

        `trained_only`: those of frozen parameters were not written to.
        """
        ...

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        ...


class TrainedModel(Sharded, Protocol):
    """What training needs of a model, whichever engine has it."""

    training: bool

    @property
    def module(self) -> nn.Module:
        """The module that the engine has taken over."""
        ...

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        ...

    @property
    def collectives(self) -> Collectives:
        """All of them."""
        ...

    @property
    def take_waits(self) -> Callable[[], Seconds] | None:
        """How long computation has waited for ranks since the last time; None: not known."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As of any module."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside reduces nothing."""
        ...

    @property
    def can_prefetch(self) -> bool:
        """Whether there is anything for `prefetch_forward_params` to gather ahead of its use."""
        ...

    def prefetch_forward_params(self) -> None:
        """Start to gather what the next forward uses first."""
        ...

    def rest(self) -> None:
        """Let go of all that was gathered, so that shards may be written to. Collective."""
        ...

    def check_replicas(self) -> None:
        """Compare what several ranks hold alike. Collective."""
        ...

    def peak_memory_bytes(self) -> int | None:
        """The most bytes that the engine has held; None: not known."""
        ...

    def name_ranges(self, *, is_on: bool) -> None:
        """Have units and collectives named in profiles, or not."""
        ...


def persistent_buffers(module: nn.Module) -> Mapping[str, Tensor]:
    """The buffers that a state dict of `module` contains, by name."""
    found: dict[str, Tensor] = {}
    for prefix, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in each._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


def require_sharded(model: object, call: str) -> None:
    """Raise UsageError where `call` was given something else than a sharded model."""
    if not hasattr(model, "flat_shards"):
        raise UsageError(
            f"{call}: takes the model that shard_model returned, and was given "
            f"{type(model).__name__}; parameters are whole only while the model runs"
        )


def trainable_shards(model: Sharded) -> Iterator[FlatShard]:
    """The shards that the optimizer steps."""
    return (shard for shard in model.flat_shards() if shard.trainable)
