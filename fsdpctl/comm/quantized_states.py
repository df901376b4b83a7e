"""Optimizer states in fewer bits: 8-bit moments with a scale per 64 elements, and 24-bit weights.

All operations are elementwise, and round the same way in the body and the tail of a vectorized
loop. Results then do not depend on the position in a tensor, or on the number of ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpctl.plan.layout import Span
from fsdpctl.plan.optimizers import SCALE_BLOCK, scale_blocks

CODES, SCALES = ".codes", ".scales"  # suffixes of the tensors of a moment
_SIGNED_CODES, _ROOT_CODES = 2 * 127.0, 255.0
_LEAST = 1e-35  # smaller scales, including 0, are replaced by it before a division
_BF16_MAX = torch.finfo(torch.bfloat16).max
_INFINITY = 0x7F800000  # the bits of float32


def masked_copy_(target: Tensor, values: Tensor, skip: Tensor | None) -> None:
    """Copy `values` to `target`, unless the scalar `skip` is true; integers wrap around."""
    if skip is not None:
        values = torch.where(skip, target, values.to(target.dtype))
    target.copy_(values)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of an optimizer or a view of it: numbers, or codes with a scale per block.

    int8 codes store a signed number x, relative to the scale, as 127 y, where y = 2 x / (1 + |x|).
    uint8 codes store a non-negative number by its square root, in 255ths of the scale; only zero
    has the code 0. A scale is the largest absolute value of its block, rounded up to bf16. For
    uint8 codes it is the largest square root.
    """

    values: Tensor  # 1-D; numbers or codes
    scales: Tensor | None = None

    @property
    def has_roots(self) -> bool:
        """Whether `write` expects square roots."""
        return self.values.dtype == torch.uint8

    def window(self, span: Span) -> "Moment":
        """Return a view of the elements `span`, which must start at a block if there are codes."""
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
        """Write `factor` times the numbers to `out`; overwrite `work`. Codes need whole blocks."""
        out.copy_(self.values)
        if self.scales is None:
            if factor != 1.0:
                out.mul_(factor)
            return
        block_factors = self.scales.float()
        if self.has_roots:
            block_factors.mul_(factor**0.5 / _ROOT_CODES)
            _blocks(out).mul_(block_factors.unsqueeze(1))
            out.mul_(out)
        else:
            # x = code / (254 - |code|)
            block_factors.mul_(-factor)
            out.div_(torch.abs(out, out=work).sub_(_SIGNED_CODES))
            _blocks(out).mul_(block_factors.unsqueeze(1))

    def write(
        self, new: Tensor, work: Tensor, skip: Tensor | None = None, factor: float = 1.0
    ) -> None:
        """Replace the numbers by `factor` times `new`, unless the scalar `skip` is true.

        `new` has the square roots for uint8 codes. `new` and `work` are overwritten.
        """
        if self.scales is None:
            masked_copy_(self.values, new if factor == 1.0 else new.mul_(factor), skip)
            return
        if self.has_roots:
            least = torch.sign(new, out=work)  # code 1, or 0 for zero
            scales = _rounded_up(_largest(new).mul_(factor))
            block_factors = (_ROOT_CODES * factor) / scales.float().clamp_(min=_LEAST)
            _blocks(new).mul_(block_factors.unsqueeze(1))
            torch.maximum(new.round_(), least, out=new)
            codes = work.view(torch.int32).copy_(new)  # int32 to uint8 is faster than float32
        else:
            torch.abs(new, out=work)
            scales = _rounded_up(_largest(work))
            block_scales = scales.float().clamp_(min=_LEAST)
            _blocks(work).add_(block_scales.unsqueeze(1))
            codes = new.div_(work).mul_(_SIGNED_CODES).round_()
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
    """Return the names of the moments, given the names of their tensors, in the same order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in states if name != "step"))


def new_moment(name: str, numel: int, like: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a moment of zeros: codes and scales if `dtype` is int8 or uint8."""
    if dtype.is_floating_point:
        return {name: like.new_zeros(numel, dtype=dtype)}
    scales = like.new_zeros(numel // SCALE_BLOCK, dtype=torch.bfloat16)
    return {name + CODES: like.new_zeros(numel, dtype=dtype), name + SCALES: scales}


# ---- 24-bit weights: a float32 rounded to bf16, and a signed 8-bit remainder -------------------


def join_24_bits(upper: Tensor, remainder: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the exact float32 values of 24-bit weights: the `upper` 16 bits, and a remainder."""
    out = upper.new_empty(upper.shape, dtype=torch.float32) if out is None else out
    bits = out.view(torch.int32).copy_(upper.view(torch.int16))
    bits.bitwise_left_shift_(8).add_(remainder).bitwise_left_shift_(8)
    return out


def split_24_bits(
    weights: Tensor, upper: Tensor, remainder: Tensor, skip: Tensor | None = None
) -> None:
    """Round float32 `weights` to 24 bits: write `upper` and `remainder`, overwrite `weights`."""
    bits = weights.view(torch.int32).clamp_(max=0x7FC00000)  # a larger NaN would overflow
    # The offset rounds both to nearest. The low byte is the remainder + 128, signed after xor 128.
    bits.add_(0x8080).bitwise_right_shift_(8).bitwise_xor_(128)
    masked_copy_(remainder, bits, skip)
    masked_copy_(upper.view(torch.int16), bits.bitwise_right_shift_(8), skip)
