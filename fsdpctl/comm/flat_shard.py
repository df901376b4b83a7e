"""A rank's part of a unit, which engines, optimizers, checkpoints and training share."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.mesh import Mesh
from fsdpctl.comm.quantized_states import join_24_bits, split_24_bits
from fsdpctl.errors import EngineError, UsageError
from fsdpctl.plan.layout import FlatLayout, ParamSlice, Span


class HostScalars(NamedTuple):
    """The scalars of a step of master weights in host memory, in float32."""

    grad_scale: Tensor | None
    found_inf: Tensor | None


T = TypeVar("T")
# Steps the master weights of a shard with a gradient in host memory, in a thread of the host. The
# last argument is to be called with each span of the flat buffer once it is stepped.
HostUpdate = Callable[["FlatShard", Tensor, HostScalars, Callable[[Span], None]], None]


@dataclass(frozen=True, slots=True)
class OffloadedGradient:
    """A reduced gradient that has left for host memory."""

    values: Tensor  # on the host, once `arrived` is reached
    norm: Tensor  # the 2-norm, on the device
    arrived: torch.cuda.Event | None

    def synchronize(self) -> Tensor:
        """Return the gradient, once it has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values


class HostSteps(Protocol):
    """The steps of a model's master weights, which are in host memory."""

    def start(self, update: HostUpdate, scalars: HostScalars) -> None:
        """Start to step all of them; the step takes the gradients.

        In the next forward, each unit waits for its own step.
        """

    def synchronize(self) -> None:
        """Wait until they are what the last step makes of them."""

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function()` in the thread that steps them."""


class FlatShard:
    """This rank's master weights of one flat buffer, and their gradient."""

    def __init__(
        self,
        unit: str,
        layout: FlatLayout,
        master: Tensor,
        *,
        span: Span,
        owned_span: Span,
        saved_span: Span,
        num_owners: int = 1,
    ) -> None:
        """Wrap `master`, the elements `held` in 1-D.

        `held` is the full buffer if masters are replicated, else `owned`, the part whose gradient
        this rank reduces and counts in norms, like `num_owners` ranks. Replicas share the work to
        save it: this rank saves `written`.
        """
        self.unit, self.layout = unit, layout
        self.span, self.owned_span, self.saved_span = span, owned_span, saved_span
        self.num_owners = num_owners
        self.is_replicated = span != owned_span  # every rank holds all master weights
        self.param = nn.Parameter(master, requires_grad=layout.trainable)
        self.remainder: Tensor | None = None  # of masters of 24 bits, besides their bf16 half
        self.grad_dtype = master.dtype
        self.device = master.device  # of its gradient
        self._synchronize: Callable[[], None] | None = None
        self._grad: Tensor | None = None  # if the masters are on another device
        self.offloaded_grad: OffloadedGradient | None = None  # if it is on the host, too

    def add_remainder(self, remainder: Tensor, grad_dtype: torch.dtype) -> None:
        """Turn the master weights, which are bf16, into the upper half of 24 bits."""
        self.remainder, self.grad_dtype = remainder, grad_dtype
        self.param.grad_dtype = grad_dtype

    def mark_on_host(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        """Declare that the masters are in host memory.

        Gradients are on `device`. `settle()` waits for a step that writes the masters, and for
        copies that read them.
        """
        self.device, self._synchronize = device, synchronize

    @property
    def is_on_host(self) -> bool:
        """Whether the masters are in host memory; if they are trained, they are stepped there."""
        return self._synchronize is not None

    @property
    def master(self) -> Tensor:
        """The weights that the optimizer updates, or their upper half; 1-D, the elements `held`.

        Waits for what the host does with them.
        """
        if self._synchronize is not None:
            self._synchronize()
        return self.param.detach()

    @property
    def itemsize(self) -> int:
        return self.param.itemsize + (self.remainder is not None)

    def weights(self) -> Tensor:
        """Return the exact master weights: the tensor itself, or a float32 copy of 24 bits."""
        return self.master if self.remainder is None else join_24_bits(self.master, self.remainder)

    def write_span(self, span: Span, values: Tensor) -> None:
        """Overwrite the elements `span` of the flat buffer, rounded to the master weights' bits."""
        half = self.view(self.master, span)
        if self.remainder is None:
            half.copy_(values)
        else:
            copy = torch.empty(half.shape, device=half.device).copy_(values)
            split_24_bits(copy, half, self.view(self.remainder, span))

    @property
    def dtype(self) -> torch.dtype:
        return self.param.dtype

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient, shaped like `master`; None before the first reduction."""
        return self._grad if self.is_on_host else self.param.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.is_on_host:
            self._grad = gradient
        else:
            self.param.grad = gradient

    @property
    def has_grad(self) -> bool:
        """Whether there is a reduced gradient, here or on the host."""
        return self.grad is not None or self.offloaded_grad is not None

    @property
    def trainable(self) -> bool:
        return self.param.requires_grad

    @property
    def owned_grad(self) -> Tensor | None:
        if self.grad is None or not self.is_replicated:
            return self.grad
        return self.view(self.grad, self.owned_span)

    def view(self, values: Tensor, span: Span) -> Tensor:
        """Return the elements `span` of the flat buffer in `values`, a tensor like `master`."""
        return values[span.start - self.span.start : span.stop - self.span.start]

    def param_slices(self) -> tuple[ParamSlice, ...]:
        return self.layout.param_slices(self.span)


class ShardedModelProtocol(Protocol):
    """A sharded model as optimizers and checkpoints use it."""

    @property
    def module(self) -> nn.Module:
        """The module that was sharded."""

    @property
    def mesh(self) -> Mesh:
        """Its groups of ranks."""

    def flat_shards(self) -> tuple[FlatShard, ...]:
        """Return this rank's shards, in the same order on every rank."""

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """Return the module's buffers that belong in a checkpoint, by name."""

    def sync_gradients(self) -> None:
        """Reduce the gradients that were held back."""

    def absent_everywhere(self) -> frozenset[str]:
        """Return the names of trainable parameters that had a gradient on no rank."""

    def broadcast_updated_params(self, *, trained_only: bool = False) -> None:
        """Make writes to the masters on any rank visible to the next forward.

        `trained_only`: masters of frozen parameters are unchanged.
        """

    @property
    def host(self) -> HostSteps | None:
        """The steps of master weights in host memory, or None if they are on the device."""

    def drop_gradients(self) -> None:
        """Drop all gradients."""


def persistent_buffers(module: nn.Module) -> Mapping[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in each._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


def require_sharded(model: object, call: str) -> None:
    if not hasattr(model, "flat_shards"):
        raise UsageError(
            f"{call}: expected the model that shard_model returned, got a {type(model).__name__}; "
            "parameters are unsharded only while the model runs"
        )


def gradient_norms(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each gradient, in at least float32."""
    # In bf16 a norm would have 8 bits, too few to decide on clipping.
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch._foreach_norm(gradients, 2, dtype=dtype)


def scale_gradients(shards: Iterable[FlatShard], factor: Tensor | float) -> None:
    """Multiply the reduced gradients; waits for those that are on the host."""
    on_device = []
    for shard in shards:
        if shard.offloaded_grad is not None:
            on_cpu = factor.cpu() if isinstance(factor, Tensor) else factor
            shard.offloaded_grad.synchronize().mul_(on_cpu)
        elif shard.grad is not None:
            on_device.append(shard.grad)
    if on_device:
        torch._foreach_mul_(on_device, factor)


def trainable_shards(model: ShardedModelProtocol) -> Iterator[FlatShard]:
    return (shard for shard in model.flat_shards() if shard.trainable)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: Tensor) -> Tensor:
    """Return the bits of values; their sum is a checksum in any order."""
    return values.view(_INTEGERS[values.itemsize])


def compare_replicas(
    world: Collectives, place: int, checksums: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare parameters by `checksums` with those of ranks with an equal `place`.

    EngineError names a parameter that differs, and the rank.
    """
    places = world.all_gather_object(place)
    answers = world.all_gather_object(dict(checksums))
    for part in sorted(set(places)):
        of_part = {
            rank: {name: tuple(sums) for name, sums in answers[rank].items()}
            for rank, place in enumerate(places)
            if place == part
        }
        for name in next(iter(of_part.values()), {}):
            found = {rank: checksums[name] for rank, checksums in of_part.items()}
            usual = Counter(found.values()).most_common(1)[0][0]
            odd = [str(rank) for rank, checksum in found.items() if checksum != usual]
            if odd:
                raise EngineError(
                    f"{name} on rank {', '.join(odd)} differs from the other replicas, because of "
                    "a hardware fault or a write to the parameters of one rank only"
                )
