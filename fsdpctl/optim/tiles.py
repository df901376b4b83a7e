"""AdamW in tiles, for moments in fewer bits and 24-bit weights.

A tile is read, stepped in float32 and written back, so that no float32 tensor of a full span
exists. Results have the same bits on any number of ranks; see `quantized_states`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsdpctl.comm.flat_shard import HostScalars
from fsdpctl.comm.quantized_states import (
    Moment,
    get_moment,
    join_24_bits,
    masked_copy_,
    split_24_bits,
)
from fsdpctl.models.custom_ops import is_fusing, run_fused
from fsdpctl.optim.sharded import SteppedSpan
from fsdpctl.plan.layout import Span
from fsdpctl.plan.optimizers import NUM_TILES, SCALE_BLOCK, TILE

Scalar = Any  # a number on the CPU; otherwise a scalar tensor, so that the host does not wait


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a step of AdamW."""

    beta1: float
    beta2: float
    eps: float
    decay: Scalar  # multiplies the weights
    step_size: Scalar  # learning rate with the bias correction of the first moment
    root_correction: Scalar  # bias correction of the second moment's square root
    max_quotient: Scalar  # limit of the quotient of the moments
    grad_factor: Scalar  # multiplies a gradient before it is added to the first moment
    grad_unit: float  # (1 - beta2) / (1 - beta1)**2

    @classmethod
    def of(cls, group: Mapping[str, Any], count: Scalar, scale: Scalar) -> "Factors":
        """Return the factors of step `count`, with gradients times `scale`, in double precision.

        By the Cauchy-Schwarz inequality, no history of gradients gives AdamW a larger quotient than
        `max_quotient`. So the limit only removes rounding errors.
        """
        beta1, beta2 = group["betas"]
        first_correction, second_correction = 1 - beta1**count, 1 - beta2**count
        ratio = beta1 * beta1 / beta2 if beta2 else 0.0
        terms = count if ratio == 1 else (1 - ratio**count) / (1 - ratio)
        max_quotient = (1 - beta1) * (terms / (1 - beta2)) ** 0.5
        return cls(
            beta1,
            beta2,
            eps=group["eps"],
            decay=1 - group["lr"] * group["weight_decay"],
            step_size=group["lr"] / first_correction,
            root_correction=second_correction**-0.5,
            # In units of the uncorrected first moment.
            max_quotient=max_quotient * second_correction**0.5 if beta2 else float("inf"),
            grad_factor=(1 - beta1) * scale,
            grad_unit=(1 - beta2) / (1 - beta1) ** 2,
        )

    def as_tensors(self, device: torch.device) -> "Factors":
        """Make tensors of factors that change between steps: Dynamo would recompile for numbers."""
        tensors: dict[str, Any] = {
            name: torch.full((), value, dtype=torch.float64, device=device)
            for name in ("decay", "step_size", "root_correction", "max_quotient", "grad_factor")
            if not isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)


class TiledStep:
    """A step of spans, one after another, with one set of tiles."""

    def __init__(
        self, spans: list[SteppedSpan], scalars: HostScalars, *, is_fused: bool = False
    ) -> None:
        """Prepare to step `spans`; `is_fused` allows fused kernels.

        Gradients are divided by `scalars.grad_scale`.
        """
        grad_scale, found_inf = scalars
        largest = max((stepped.span.numel for stepped in spans), default=0)
        self._device = spans[0].param.device if spans else torch.device("cpu")
        self._fuses = is_fused and is_fusing(self._device)
        self._size = min(largest, TILE.get(self._device.type, TILE["cuda"]))
        # Reading a scalar on the CPU waits for no device.
        on_cpu = self._device.type == "cpu"
        self._scale: Scalar = 1.0
        if grad_scale is not None:
            inverse = grad_scale.double().reciprocal()
            self._scale = float(inverse) if on_cpu else inverse
        self.is_skipped = on_cpu and found_inf is not None and bool(found_inf)
        self._skip = None if on_cpu or found_inf is None else found_inf != 0

    def step(
        self,
        stepped: SteppedSpan,
        gradient: Tensor,
        group: Mapping[str, Any],
        state: dict[str, Tensor],
        on_tile: Callable[[Span], None] = lambda _: None,
    ) -> None:
        """Step a span with its gradient, and call `on_tile` with each tile that is stepped."""
        count = state["step"] + 1
        step_count = float(count) if count.device.type == "cpu" else count.double()
        factors = Factors.of(group, step_count, self._scale)
        if self._fuses:
            factors = factors.as_tensors(self._device)
        first, second = get_moment(state, "exp_avg"), get_moment(state, "exp_avg_sq")
        shard = stepped.shard
        for tile in Span(0, stepped.span.numel).split(self._size):
            grad_tile, flat_span = gradient[tile.start : tile.stop], tile.shift(stepped.span.start)
            master, remainder = shard.view(shard.param.detach(), flat_span), shard.remainder
            remainder = None if remainder is None else shard.view(remainder, flat_span)
            moments, weights = (first.window(tile), second.window(tile)), (master, remainder)
            arguments = (grad_tile, moments, weights, factors, self._skip)
            if self._fuses and tile.numel > SCALE_BLOCK:
                run_fused(_step_tile, *arguments)
            else:
                _step_tile(*arguments, self._tiles[:, : tile.numel].unbind())
            on_tile(flat_span)
        masked_copy_(state["step"], count, self._skip)

    @cached_property
    def _tiles(self) -> Tensor:
        return torch.empty(NUM_TILES, self._size, device=self._device)


def _step_tile(
    gradient: Tensor,
    moments: tuple[Moment, Moment],
    weights: tuple[Tensor, Tensor | None],
    factors: Factors,
    skip: Tensor | None,
    tiles: Sequence[Tensor] = (),
) -> None:
    # Separate tensors: for views of one tensor, Dynamo would specialize on the size.
    if not tiles:
        tiles = [torch.empty_like(gradient, dtype=torch.float32) for _ in range(NUM_TILES)]
    m, v, work, grad = tiles
    first, second = moments
    # `grad` includes the factor `grad_factor`; with roots, the tile `v` holds the second moment
    # divided by `grad_unit`. This saves passes over the tile.
    if gradient.dtype == torch.float32:
        torch.mul(gradient, factors.grad_factor, out=grad)
    else:
        grad.copy_(gradient).mul_(factors.grad_factor)
    first.read(m, work, factors.beta1)
    m.add_(grad)
    unit = factors.grad_unit if second.has_roots else 1.0
    second.read(v, work, factors.beta2 / unit)
    torch.mul(grad, grad, out=work)
    v.add_(work if second.has_roots else work.mul_(factors.grad_unit))
    if not second.has_roots:
        second.write(v, work, skip)  # plain numbers: leaves `v` as it is
    # MKL's float32 square root on CPUs is not always correctly rounded; a float64 root is.
    v.copy_(v.double().sqrt_()) if v.device.type == "cpu" else v.sqrt_()
    scaled_root = factors.root_correction * unit**0.5
    torch.add(v, factors.eps / scaled_root, out=work)
    update = torch.div(m, work, out=work)
    limit = factors.max_quotient * scaled_root
    update.clamp_(-limit, limit).mul_(factors.step_size / scaled_root)
    _apply(*weights, update, grad, factors.decay, skip)
    first.write(m, work, skip)
    if second.has_roots:
        second.write(v, work, skip, unit**0.5)


def _apply(
    master: Tensor, remainder: Tensor | None, update: Tensor, work: Tensor, decay: Scalar, skip: Any
) -> None:
    """Multiply weights by `decay` and subtract `update`."""
    if remainder is not None:
        weights = join_24_bits(master, remainder, work).mul_(decay).sub_(update)
        split_24_bits(weights, master, remainder, skip)
    elif skip is None and master.itemsize >= work.itemsize:
        master.mul_(decay).sub_(update)
    else:
        # float64 masters do not fit into the float32 tile.
        weights = master.clone() if master.itemsize > work.itemsize else work.copy_(master)
        masked_copy_(master, weights.mul_(decay).sub_(update), skip)
