"""A rank's shard of a flat buffer, which engines, optimizers, checkpoints and training share."""

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

# A function that steps the master weights of a shard with its gradient, both in host memory. It
# runs in the host's optimizer thread, and calls its last argument with each span of the flat buffer
# once that span is stepped: the span is cast at once, while it is in the cache.
HostUpdate = Callable[["FlatShard", Tensor, HostScalars, Callable[[Span], None]], None]


@dataclass(frozen=True, slots=True)
class OffloadedGradient:
    """A reduced gradient that is being copied, or was copied, to host memory."""

    values: Tensor  # in host memory; valid once the device has passed `arrived`
    norm: Tensor  # the 2-norm, on the device
    arrived: torch.cuda.Event | None

    def synchronize(self) -> Tensor:
        """Wait on the host until the gradient has arrived; return it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values


class HostSteps(Protocol):
    """The steps of a model's master weights in host memory."""

    def start(self, update: HostUpdate, scalars: HostScalars) -> None:
        """Start to step all master weights; the step takes the gradients.

        In the next forward, each unit waits for its own step.
        """

    def synchronize(self) -> None:
        """Wait until the last step is complete."""

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function()`, called in the thread that steps master weights."""


class FlatShard:
    """This rank's master weights of a flat buffer, and their gradient."""

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
        """Wrap `master`, the elements `span` of the flat buffer as a 1-D tensor.

        `owned_span` has the elements whose gradient this rank reduces, and counts in norms together
        with `num_owners` ranks that own them too. `span` is the full buffer if masters are
        replicated, else `owned_span`. In a checkpoint, this rank saves `saved_span`: replicas share
        that work.
        """
        self.unit, self.layout = unit, layout
        self.span, self.owned_span, self.saved_span = span, owned_span, saved_span
        self.num_owners = num_owners
        self.is_replicated = span != owned_span  # each rank stores all master weights
        self.param = nn.Parameter(master, requires_grad=layout.trainable)
        self.remainder: Tensor | None = None  # the lower 8 bits of 24-bit masters
        self.grad_dtype = master.dtype
        self.device = master.device  # where gradients are reduced
        self._synchronize: Callable[[], None] | None = None
        # If masters are in host memory: torch requires `param.grad` to be on the device of `param`.
        self._grad: Tensor | None = None
        self.offloaded_grad: OffloadedGradient | None = None

    def add_remainder(self, remainder: Tensor, grad_dtype: torch.dtype) -> None:
        """Make the bf16 master weights the upper half of 24-bit weights."""
        self.remainder, self.grad_dtype = remainder, grad_dtype
        self.param.grad_dtype = grad_dtype

    def mark_on_host(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        """Mark the masters as being in host memory; gradients are reduced on `device`.

        The host's thread writes the masters while training continues, and copies to the device read
        them. `synchronize()` waits for both: before it returns, a read or write would race.
        """
        self.device, self._synchronize = device, synchronize

    @property
    def is_on_host(self) -> bool:
        """Whether the masters are in host memory, where the host steps them if they are trained."""
        return self._synchronize is not None

    @property
    def master(self) -> Tensor:
        """The weights that the optimizer updates, or their upper half; 1-D, the elements `span`.

        Waits until the host neither steps nor copies them.
        """
        if self._synchronize is not None:
            self._synchronize()
        return self.param.detach()

    @property
    def itemsize(self) -> int:
        return self.param.itemsize + (self.remainder is not None)

    def weights(self) -> Tensor:
        """Return the exact master weights: the tensor itself, or a float32 copy."""
        return self.master if self.remainder is None else join_24_bits(self.master, self.remainder)

    def write_span(self, span: Span, values: Tensor) -> None:
        """Overwrite the elements `span` of the flat buffer, rounded to the bits of the masters."""
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
        """The reduced gradient in the shape of `master`; None before the first reduction."""
        return self._grad if self.is_on_host else self.param.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.is_on_host:
            self._grad = gradient
        else:
            self.param.grad = gradient

    @property
    def has_grad(self) -> bool:
        """Whether there is a reduced gradient, on the device or in host memory."""
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
        """Return the elements `span` of the flat buffer as a view of `values`, as `master`."""
        return values[span.start - self.span.start : span.stop - self.span.start]

    def param_slices(self) -> tuple[ParamSlice, ...]:
        return self.layout.param_slices(self.span)


class ShardedModelProtocol(Protocol):
    """The interface of a sharded model that optimizers and checkpoints use."""

    @property
    def module(self) -> nn.Module:
        """The module that was sharded."""

    @property
    def mesh(self) -> Mesh:
        """The groups of ranks of the model."""

    def flat_shards(self) -> tuple[FlatShard, ...]:
        """Return this rank's shards, in the same order on every rank."""

    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """Return the module's buffers that belong in a checkpoint, by name."""

    def sync_gradients(self) -> None:
        """Reduce the gradients that `no_sync` held."""

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
    buffers: dict[str, Tensor] = {}
    for prefix, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in each._non_persistent_buffers_set:
                buffers[f"{prefix}.{key}" if prefix else key] = buffer
    return buffers


def require_sharded(model: object, call: str) -> None:
    if not hasattr(model, "flat_shards"):
        raise UsageError(
            f"{call}: expected the model that shard_model returned, got a {type(model).__name__}; "
            "parameters are unsharded only while the model runs"
        )


def gradient_norms(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each gradient, in at least float32."""
    # A bf16 norm would have 8 significant bits, too few to decide on clipping.
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch._foreach_norm(gradients, 2, dtype=dtype)


def scale_gradients(shards: Iterable[FlatShard], factor: Tensor | float) -> None:
    """Multiply the reduced gradients by `factor`; wait for gradients in host memory."""
    on_device = []
    for shard in shards:
        if shard.offloaded_grad is not None:
            on_cpu = factor.cpu() if isinstance(factor, Tensor) else factor
            shard.offloaded_grad.synchronize().mul_(on_cpu)
            shard.offloaded_grad.norm.mul_(factor)
        elif shard.grad is not None:
            on_device.append(shard.grad)
    if on_device:
        torch._foreach_mul_(on_device, factor)


def trainable_shards(model: ShardedModelProtocol) -> Iterator[FlatShard]:
    return (shard for shard in model.flat_shards() if shard.trainable)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: Tensor) -> Tensor:
    """Return the bits of `values` as integers, whose sum does not depend on their order."""
    return values.view(_INTEGERS[values.itemsize])


def compare_replicas(
    world: Collectives, shard_index: int, checksums: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare the `checksums` of parameters on all ranks with an equal `shard_index`. Collective.

    EngineError names a parameter that differs, and the rank.
    """
    shard_indices = world.all_gather_values(shard_index)
    answers = world.all_gather_values(dict(checksums))
    for shard in sorted(set(shard_indices)):
        replicas = {
            rank: {name: tuple(sums) for name, sums in answers[rank].items()}
            for rank, index in enumerate(shard_indices)
            if index == shard
        }
        for name in next(iter(replicas.values()), {}):
            by_rank = {rank: checksums[name] for rank, checksums in replicas.items()}
            expected = Counter(by_rank.values()).most_common(1)[0][0]
            different = [str(rank) for rank, checksum in by_rank.items() if checksum != expected]
            if different:
                raise EngineError(
                    f"{name} on rank {', '.join(different)} differs from the other replicas, "
                    "because of a hardware fault or a write to the parameters of one rank only"
                )
