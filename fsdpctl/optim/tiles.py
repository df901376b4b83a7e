"""AdamW in tiles, for moments that are stored in fewer bits and weights of 24 bits.

No tensor of a whole run is made: a tile is read, stepped in float32 and written back. Every element
is computed alike on any number of ranks; see `codes`. On CPUs, tiles.c computes the same bits in
one pass.
"""

from collections.abc import Callable, Iterator, Mapping
from ctypes import Array, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdpctl.comm.codes import ROOT_CODES, Moment, moment_of, put, split, widen
from fsdpctl.comm.shards import FlatShard
from fsdpctl.io.native import in_threads, native
from fsdpctl.optim.sharded import SteppedRun
from fsdpctl.plan.layout import Span
from fsdpctl.plan.states import BLOCK, NUM_TILES, TILE

Scalar = (
    Any  # a number on the CPU; on other devices a scalar tensor, which the host never waits for
)
_SOURCE = Path(__file__).with_suffix(".c")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a step of AdamW."""

    beta1: float
    beta2: float
    eps: float
    kept: Scalar  # of the weights, after weight decay
    rate: Scalar  # learning rate, corrected for the zeros that the first moment began with
    root: Scalar  # of the second moment's square root, the same
    bound: Scalar  # of the quotient of the moments
    share: float  # of the gradient in the first moment
    unit: float  # of the second moment's part of a gradient's square, over the share's square

    @classmethod
    def of(cls, group: Mapping[str, Any], count: Scalar) -> "Factors":
        """Return the factors of step `count`, in double precision.

        By the Cauchy-Schwarz inequality no history of gradients gives AdamW a larger quotient than
        `bound`, so only errors of rounding are cut off by it.
        """
        beta1, beta2 = group["betas"]
        first, second = 1 - beta1**count, 1 - beta2**count
        ratio = beta1 * beta1 / beta2 if beta2 else 0.0
        terms = count if ratio == 1 else (1 - ratio**count) / (1 - ratio)
        bound = (1 - beta1) * (terms / (1 - beta2)) ** 0.5
        return cls(
            beta1,
            beta2,
            group["eps"],
            1 - group["lr"] * group["weight_decay"],
            group["lr"] / first,
            second**-0.5,
            # In units of the uncorrected first moment.
            bound * second**0.5 if beta2 else float("inf"),
            1 - beta1,
            (1 - beta2) / (1 - beta1) ** 2,
        )

    def for_kernel(self, scale: float, has_roots: bool) -> Array[c_float]:
        """Return the factors of the kernel, in its order; gradients are multiplied by `scale`."""
        unit = self.unit if has_roots else 1.0
        root = self.root * unit**0.5
        one, two = self.beta1, self.beta2
        if has_roots:
            one, two = -one, (two / unit) ** 0.5 / ROOT_CODES
        factors = (
            *(self.share * scale, one, two, self.unit, unit**0.5, ROOT_CODES * unit**0.5),
            *(self.eps / root, self.bound * root, self.rate / root, self.kept),
        )
        return (c_float * len(factors))(*factors)


def _kernel_of(shard: FlatShard, first: Moment, gradient: Tensor) -> Callable[..., Any] | None:
    """Return the kernel for a shard on the CPU; None if its dtypes or the machine have none."""
    is_split, master = shard.remainder is not None, shard.master
    kinds = _KINDS.get(gradient.dtype), _KINDS.get(first.values.dtype)
    is_plain = gradient.is_contiguous() and (is_split or master.dtype == torch.float32)
    if master.device.type != "cpu" or None in kinds or not is_plain:
        return None
    return native(_SOURCE, "step", GRADIENT=kinds[0], MOMENTS=kinds[1], SPLIT=int(is_split))


class TiledStep:
    """Steps runs one after another, with one set of tiles."""

    def __init__(
        self, runs: list[SteppedRun], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Prepare steps of `runs`; gradients are divided by `grad_scale`."""
        largest = max((run.span.numel for run in runs), default=0)
        self._device = runs[0].param.device if runs else torch.device("cpu")
        self._size = min(largest, TILE.get(self._device.type, TILE["cuda"]))
        # A scalar on the CPU is read without waiting.
        on_cpu = self._device.type == "cpu"
        # By which gradients are multiplied: a double on the CPU.
        self._scale: Scalar = 1.0
        if grad_scale is not None:
            inverse = grad_scale.double().reciprocal()
            self._scale = float(inverse) if on_cpu else inverse
        self.is_skipped = on_cpu and found_inf is not None and bool(found_inf)
        self._skip = None if on_cpu or found_inf is None else found_inf != 0

    def step(self, run: SteppedRun, group: Mapping[str, Any], state: dict[str, Tensor]) -> None:
        """Step a run, unless the step is skipped."""
        count = state["step"] + 1
        factors = Factors.of(group, float(count) if count.device.type == "cpu" else count.double())
        gradient = run.gradient()
        assert gradient is not None
        first, second = moment_of(state, "exp_avg"), moment_of(state, "exp_avg_sq")
        if kernel := _kernel_of(run.shard, first, gradient):
            self._step_at_once(kernel, run, gradient, (first, second), factors)
        else:
            for span in _tiles(run.span.numel, self._size):
                part = gradient[span.start : span.stop]
                self._tile(run, span, part, (first.window(span), second.window(span)), factors)
        put(state["step"], count, self._skip)

    def _step_at_once(
        self,
        kernel: Callable[..., Any],
        run: SteppedRun,
        gradient: Tensor,
        moments: tuple[Moment, Moment],
        by: Factors,
    ) -> None:
        factors, low = by.for_kernel(self._scale, moments[1].has_roots), run.shard.remainder

        def step(start: int, stop: int) -> None:
            span = Span(start, stop)
            at = span.shift(run.span.start)
            first, second = (each.window(span) for each in moments)
            tensors = (
                *(gradient[start:stop], run.shard.view(run.shard.master, at)),
                None if low is None else run.shard.view(low, at),
                *(first.values, first.scales, second.values, second.scales),
            )
            places = (None if each is None else c_void_p(each.data_ptr()) for each in tensors)
            kernel(factors, c_int64(span.numel), *places)

        in_threads(step, run.span.numel, torch.get_num_threads(), multiple=BLOCK)

    @cached_property
    def _tiles(self) -> Tensor:
        return torch.empty(NUM_TILES, self._size, device=self._device)

    def _tile(
        self,
        run: SteppedRun,
        span: Span,
        gradient: Tensor,
        moments: tuple[Moment, Moment],
        by: Factors,
    ) -> None:
        m, v, work, grad = self._tiles[:, : span.numel].unbind()
        first, second = moments
        # Factors of whole tiles join those of the gradient or of blocks, so that fewer passes over
        # a tile remain: gradients have the unit of the first moment, v that of their squares.
        share = by.share * self._scale
        if gradient.dtype == torch.float32:
            torch.mul(gradient, share, out=grad)
        else:
            grad.copy_(gradient).mul_(share)
        first.read(m, work, by.beta1)
        m.add_(grad)
        unit = by.unit if second.has_roots else 1.0
        second.read(v, work, by.beta2 / unit)
        torch.mul(grad, grad, out=work)
        v.add_(work if second.has_roots else work.mul_(by.unit))
        if not second.has_roots:
            second.write(v, work, self._skip)
        # torch's square root on CPUs, MKL's, is not always the nearest one; that of doubles is.
        v.copy_(v.double().sqrt_()) if v.device.type == "cpu" else v.sqrt_()
        root = by.root * unit**0.5
        torch.add(v, by.eps / root, out=work)
        update = torch.div(m, work, out=work)
        update.clamp_(-by.bound * root, by.bound * root).mul_(by.rate / root)
        _update(run.shard, span.shift(run.span.start), update, grad, by.kept, self._skip)
        first.write(m, work, self._skip)
        if second.has_roots:
            second.write(v, work, self._skip, unit**0.5)


def _tiles(numel: int, size: int) -> Iterator[Span]:
    return (Span(start, min(start + size, numel)) for start in range(0, numel, size))


def _update(
    shard: FlatShard, span: Span, update: Tensor, work: Tensor, kept: Scalar, skip: Tensor | None
) -> None:
    """Subtract an update from weights that have decayed to `kept`."""
    master, remainder = shard.view(shard.master, span), shard.remainder
    if remainder is not None:
        low = shard.view(remainder, span)
        weights = widen(master, low, work).mul_(kept).sub_(update)
        split(weights, master, low, skip)
    elif skip is None and master.itemsize >= work.itemsize:
        master.mul_(kept).sub_(update)
    else:
        weights = master.clone() if master.itemsize > work.itemsize else work.copy_(master)
        put(master, weights.mul_(kept).sub_(update), skip)
