"""Numbers in fewer bits: moments in blocks of 64 elements that share a scale, and 24-bit weights.

All operations are elementwise and round alike in the body and the tail of a vectorized loop, so
that results do not depend on the position in a tensor: every number of ranks computes the same
bits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.plan.layout import Span
from fsdpctl.plan.optimizers import SCALE_BLOCK, scale_blocks

CODES, SCALES = ".codes", ".scales"  # suffixes of the tensors of a moment
_SIGNED, _ROOT_CODES = 254.0, 255.0
_LEAST = 1e-35  # divides in place of smaller scales
_BF16_MAX = torch.finfo(torch.bfloat16).max
_INFINITY = 0x7F800000  # the bits of float32


def masked_copy_(target: Tensor, values: Tensor, skip: Tensor | None) -> None:
    """Write `values`, unless the scalar `skip` is true; integers lose their upper bits."""
    if skip is not None:
        values = torch.where(skip, target, values.to(target.dtype))
    target.copy_(values)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of an optimizer, or a window into it: numbers, or codes with a scale per block.

    Codes of int8 are signed numbers x: 127 y, where y = 2 x / (1 + |x|) for x relative to the
    scale. Codes of uint8 are non-negative numbers, whose square root is 255ths of the scale; only
    zeros have the code 0. A scale is the largest absolute value of its block, rounded up to bf16.
    """

    values: Tensor  # 1-D; numbers or codes
    scales: Tensor | None = None

    @property
    def has_roots(self) -> bool:
        """Whether it is read and written as square roots."""
        return self.values.dtype == torch.uint8

    def window(self, span: Span) -> "Moment":
        """Return the elements `span`; that of codes begins at a block."""
        blocks, scales = scale_blocks(span), self.scales
        if scales is not None:
            scales = scales[blocks.start : blocks.stop]
        return Moment(self.values[span.start : span.stop], scales)

    def dequantized(self) -> "Moment":
        out = torch.empty(self.values.shape, device=self.values.device)
        self.read(out, torch.empty_like(out))
        return Moment(out)

    def quantized_like(self, like: "Moment") -> "Moment":
        assert like.scales is not None
        codes = Moment(torch.empty_like(like.values), torch.empty_like(like.scales))
        new = self.values.float()
        codes.write(new.sqrt() if codes.has_roots else new.clone(), torch.empty_like(new))
        return codes

    def read(self, out: Tensor, work: Tensor, factor: float = 1.0) -> None:
        """Write `factor` times the numbers to `out`, of whole blocks; `work` is overwritten."""
        out.copy_(self.values)
        if self.scales is None:
            if factor != 1.0:
                out.mul_(factor)
            return
        rows = self.scales.float()
        if self.has_roots:
            rows.mul_(factor**0.5 / _ROOT_CODES)
            _blocks(out).mul_(rows.unsqueeze(1))
            out.mul_(out)
        else:
            rows.mul_(-factor)
            out.div_(torch.abs(out, out=work).sub_(_SIGNED))
            _blocks(out).mul_(rows.unsqueeze(1))

    def write(
        self, new: Tensor, work: Tensor, skip: Tensor | None = None, unit: float = 1.0
    ) -> None:
        """Replace the numbers, unless the scalar `skip` is true; both arguments are overwritten.

        The new numbers are `unit` times `new`. Codes of uint8 are given the square roots.
        """
        if self.scales is None:
            masked_copy_(self.values, new if unit == 1.0 else new.mul_(unit), skip)
            return
        if self.has_roots:
            least = torch.sign(new, out=work)
            scales = _rounded_up(_largest(new).mul_(unit))
            rows = (_ROOT_CODES * unit) / scales.float().clamp_(min=_LEAST)
            _blocks(new).mul_(rows.unsqueeze(1))
            torch.maximum(new.round_(), least, out=new)
            codes = work.view(torch.int32).copy_(new)  # from these to bytes is faster than from new
        else:
            torch.abs(new, out=work)
            scales = _rounded_up(_largest(work))
            rows = scales.float().clamp_(min=_LEAST)
            _blocks(work).add_(rows.unsqueeze(1))
            codes = new.div_(work).mul_(_SIGNED).round_()
        masked_copy_(self.values, codes, skip)
        masked_copy_(self.scales, scales, skip)


def _blocks(values: Tensor) -> Tensor:
    return values.view(-1, SCALE_BLOCK)


def _largest(values: Tensor) -> Tensor:
    """Return the largest of the non-negative values of each block; NaN is larger than all."""
    return _blocks(values.view(torch.int32)).amax(1).view(torch.float32)


def _rounded_up(largest: Tensor) -> Tensor:
    """Return non-negative float32 values rounded up to bf16; NaN becomes infinite."""
    bits = largest.clamp_(max=_BF16_MAX).view(torch.int32).clamp_(max=_INFINITY)
    return bits.add_(0xFFFF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def get_moment(states: Mapping[str, Tensor], name: str) -> Moment:
    if name in states:
        return Moment(states[name])
    return Moment(states[name + CODES], states[name + SCALES])


def moment_names(states: Iterable[str]) -> list[str]:
    """Return the names of the moments, in order, of the names of their tensors."""
    return list(dict.fromkeys(name.partition(".")[0] for name in states if name != "step"))


def new_moment(name: str, numel: int, like: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a moment of zeros; with dtype int8 or uint8 codes and scales."""
    if dtype.is_floating_point:
        return {name: like.new_zeros(numel, dtype=dtype)}
    scales = like.new_zeros(numel // SCALE_BLOCK, dtype=torch.bfloat16)
    return {name + CODES: like.new_zeros(numel, dtype=dtype), name + SCALES: scales}


# ---- weights of 24 bits: 16 bits of float32 rounded to nearest, and a signed remainder ----------


def join_24_bits(half: Tensor, remainder: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the float32 weights of a bf16 half and its remainder, which is exact."""
    out = half.new_empty(half.shape, dtype=torch.float32) if out is None else out
    bits = out.view(torch.int32).copy_(half.view(torch.int16))
    bits.bitwise_left_shift_(8).add_(remainder).bitwise_left_shift_(8)
    return out


def split_24_bits(
    weights: Tensor, half: Tensor, remainder: Tensor, skip: Tensor | None = None
) -> None:
    """Round float32 weights, which are overwritten, to 24 bits, and write both parts of them."""
    bits = weights.view(torch.int32).clamp_(max=0x7FC00000)  # a larger NaN would overflow
    # Both are rounded to nearest, and the offset makes the low byte the remainder + 128.
    bits.add_(0x8080).bitwise_right_shift_(8).bitwise_xor_(128)
    masked_copy_(remainder, bits, skip)
    masked_copy_(half.view(torch.int16), bits.bitwise_right_shift_(8), skip)
