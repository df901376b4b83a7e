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
    """The float32 scalars of a step on the host. They may be on the device."""

    grad_scale: Tensor | None
    found_inf: Tensor | None


T = TypeVar("T")

# Steps a shard's master weights with their gradient, both in host memory, in the host's thread. The
# last argument is called with each stepped span, which is cast at once, while it is in the cache.
HostUpdateFn = Callable[["FlatShard", Tensor, HostScalars, Callable[[Span], None]], None]


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


class HostStepper(Protocol):
    """The steps of a model's master weights in host memory."""

    def start(self, update: HostUpdateFn, scalars: HostScalars) -> None:
        """Start to step all master weights and drop gradients; a unit's next forward waits."""

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

        `num_owners` ranks, this one included, reduce the gradient of `owned_span` and count it in
        norms. `span` is the full buffer if each rank stores all masters, else `owned_span`. This
        rank saves `saved_span` in checkpoints: replicas share that work.
        """
        self.unit, self.layout = unit, layout
        self.span, self.owned_span, self.saved_span = span, owned_span, saved_span
        self.num_owners = num_owners
        self.stores_all = span != owned_span  # each rank stores all master weights
        self.param = nn.Parameter(master, requires_grad=layout.trainable)
        self.remainder: Tensor | None = None  # the lower 8 bits of 24-bit masters
        self.grad_dtype = master.dtype
        self.device = master.device  # where gradients are reduced
        self._synchronize: Callable[[], None] | None = None
        # If masters are in host memory: torch requires `param.grad` to be on the device of `param`.
        self._grad: Tensor | None = None
        self.offloaded_grad: OffloadedGradient | None = None

    def add_remainder(self, remainder: Tensor, grad_dtype: torch.dtype) -> None:
        """Make the bf16 master weights the upper 16 bits of 24-bit weights."""
        self.remainder, self.grad_dtype = remainder, grad_dtype
        self.param.grad_dtype = grad_dtype

    def mark_on_host(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        """Mark the masters as being in host memory; gradients are reduced on `device`.

        `synchronize()` waits for the host's thread, which writes the masters while training
        continues, and for copies to the device. Other accesses would race: use `master`.
        """
        self.device, self._synchronize = device, synchronize

    @property
    def is_on_host(self) -> bool:
        """Whether the masters are in host memory, where the host steps them if they are trained."""
        return self._synchronize is not None

    @property
    def master(self) -> Tensor:
        """The weights that the optimizer updates, or their upper 16 bits; 1-D, the elements `span`.

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
        upper = self.view(self.master, span)
        if self.remainder is None:
            upper.copy_(values)
        else:
            copy = torch.empty(upper.shape, device=upper.device).copy_(values)
            split_24_bits(copy, upper, self.view(self.remainder, span))

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
        if self.grad is None or not self.stores_all:
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

    def params_without_grad(self) -> frozenset[str]:
        """Return the names of trainable parameters that had a gradient on no rank."""

    def broadcast_updated_params(self, *, trained_only: bool = False) -> None:
        """Make writes to the masters on any rank visible to the next forward.

        `trained_only`: masters of frozen parameters are unchanged.
        """

    @property
    def host(self) -> HostStepper | None:
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
        name = type(model).__name__
        raise UsageError(f"{call}: expected the model that shard_model returned, got a {name}")


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


def integer_view(values: Tensor) -> Tensor:
    """Return the bits of `values` as integers, whose sum does not depend on their order."""
    return values.view(_INTEGERS[values.itemsize])


def compare_replicas(world: Collectives, index: int, sums: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the checksums of parameters on ranks with an equal `index` of the shard. Collective.

    EngineError names a parameter that differs, and the rank.
    """
    indices = world.all_gather_values(index)
    sums_by_rank = world.all_gather_values(dict(sums))
    for shard_index in sorted(set(indices)):
        ranks = [rank for rank, each in enumerate(indices) if each == shard_index]
        for name in sums_by_rank[ranks[0]]:
            replicas = {rank: tuple(sums_by_rank[rank][name]) for rank in ranks}
            expected = Counter(replicas.values()).most_common(1)[0][0]
            different = [str(rank) for rank in ranks if replicas[rank] != expected]
            if different:
                other = next(rank for rank in ranks if replicas[rank] == expected)
                raise EngineError(
                    f"{name} on rank {', '.join(different)} differs from rank {other}, "
                    "because of a hardware fault or a write to the parameters of one rank only"
                )
