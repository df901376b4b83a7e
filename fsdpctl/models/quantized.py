"""Frozen weights in NF4 (Dettmers et al., QLoRA, 2023), int8 or float32, and their products.

A parameter is stored in groups of 256 blocks of 64 weights; the last may be shorter. NF4's group:

    2 float32   a and b: the scale of a block is (a + b * level) ** 4
    32 bytes    per block: two 4-bit codes per byte, the first one in the upper half
    1 byte      per block: its level

The codes are the same as in bitsandbytes and torchao. A group in int8:

    64 bytes    per block: signed codes
    2 bytes     per block: its scale in bf16, by which codes are multiplied

In float32, a block is its 64 weights. Levels depend only on weights of their group. So a rank reads
whole groups to quantize its shard, and the bytes do not depend on the number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.models.attention_kernels import device_type
from fsdpctl.models.custom_ops import is_fusing, operator, run_fused

# Quantiles of a normal distribution, as published with QLoRA.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK, _BLOCKS_PER_GROUP = 64, 256
GROUP = BLOCK * _BLOCKS_PER_GROUP  # weights
# Groups that are converted at a time. Fewer groups need less memory, but more kernel launches.
_GROUPS_AT_ONCE, _DEQUANTIZED_ON_CUDA_AT_ONCE = 128, 1024


class QuantFormat(ABC):
    """A format in which weights are stored as bytes."""

    name: str
    _constant_bytes: int  # at the start of a group
    _block_bytes: int

    @property
    def group_bytes(self) -> int:
        return self._constant_bytes + _BLOCKS_PER_GROUP * self._block_bytes

    def num_bytes(self, numel: int) -> int:
        groups, rest = divmod(numel, GROUP)
        last = self._constant_bytes + -(-rest // BLOCK) * self._block_bytes if rest else 0
        return groups * self.group_bytes + last

    def empty(self, numel: int, device: torch.device) -> nn.Parameter:
        stored = torch.empty(self.num_bytes(numel), dtype=torch.uint8, device=device)
        return nn.Parameter(stored, requires_grad=False)

    @torch.no_grad()
    def quantize(self, weights: Tensor) -> Tensor:
        """Return the bytes of flattened `weights`, whose first element begins a group."""
        flat = weights.reshape(-1)
        stored = torch.empty(self.num_bytes(len(flat)), dtype=torch.uint8, device=flat.device)
        position = 0
        for chunk in flat.split(_GROUPS_AT_ONCE * GROUP):
            for values in chunk.float().split((len(chunk) // GROUP * GROUP, len(chunk) % GROUP)):
                if len(values):
                    padded = F.pad(values, (0, -len(values) % BLOCK))
                    blocks = min(len(padded) // BLOCK, _BLOCKS_PER_GROUP)
                    quantized = self._quantized(padded.view(-1, blocks, BLOCK)).view(-1)
                    stored[position : position + len(quantized)] = quantized
                    position += len(quantized)
        return stored

    def dequantize(self, stored: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weights of `shape` in `dtype`, computed in float32."""
        numel, size = prod(shape), self.group_bytes
        weights = torch.empty(-(-numel // BLOCK) * BLOCK, dtype=dtype, device=stored.device)
        on_cuda = device_type(stored) == "cuda"
        step = _DEQUANTIZED_ON_CUDA_AT_ONCE if on_cuda else _GROUPS_AT_ONCE
        num_groups = numel // GROUP
        chunked = num_groups // step * step
        # Chunks of `step` groups, then the remaining groups.
        for start, stop, parts in ((0, chunked, num_groups // step), (chunked, num_groups, 1)):
            if start < stop:
                groups = stored[start * size : stop * size].view(stop - start, size)
                target = weights[start * GROUP : stop * GROUP]
                DEQUANTIZE(target, groups, _BLOCKS_PER_GROUP, parts, self.name)
        if rest := numel % GROUP:
            last = stored[num_groups * size :].view(1, -1)
            pairs = code_pairs(stored.device)
            self.dequantize_into(weights[num_groups * GROUP :], last, -(-rest // BLOCK), pairs)
        return weights[:numel].view(shape)

    def dequantize_groups(self, target: Tensor, stored: Tensor, pairs: Tensor) -> None:
        self.dequantize_into(target, stored.view(-1, self.group_bytes), _BLOCKS_PER_GROUP, pairs)

    @abstractmethod
    def _quantized(self, weights: Tensor) -> Tensor:
        """Return the bytes of weights of shape (groups, blocks, 64), a row for each group."""

    @abstractmethod
    def dequantize_into(self, target: Tensor, groups: Tensor, blocks: int, pairs: Tensor) -> None:
        """Write the weights of `groups`, (groups, bytes), which have `blocks` each, to `target`.

        `pairs` is the result of `code_pairs`.
        """


class _Nf4(QuantFormat):
    name, _constant_bytes, _block_bytes = "nf4", 8, BLOCK // 2 + 1

    def _quantized(self, weights: Tensor) -> Tensor:
        values = torch.tensor(NF4_VALUES, dtype=torch.float64)
        midpoints = ((values[1:] + values[:-1]) / 2).float()
        max_abs = weights.abs().amax(-1)
        scaled = weights / torch.where(max_abs > 0, max_abs, 1.0).unsqueeze(-1)
        codes = torch.zeros(scaled.shape, dtype=torch.uint8, device=weights.device)
        for limit in midpoints.tolist():
            codes += scaled > limit
        packed = codes[..., 0::2] << 4 | codes[..., 1::2]
        # The level of a block of zeros has no effect: each of its codes stands for 0.
        roots = max_abs.sqrt().sqrt()
        high = roots.amax(-1, keepdim=True)
        low = torch.where(max_abs > 0, roots, torch.inf).amin(-1, keepdim=True).minimum(high)
        step = (high - low) / 255
        levels = ((roots - low) / torch.where(step > 0, step, 1.0)).round().clamp(0, 255)
        constants = torch.cat((low, step), -1).view(torch.uint8)
        return torch.cat((constants, packed.flatten(1), levels.to(torch.uint8)), -1)

    def dequantize_into(self, target: Tensor, groups: Tensor, blocks: int, pairs: Tensor) -> None:
        constants = groups[:, : self._constant_bytes].reshape(-1).view(torch.float32).view(-1, 2)
        codes = groups[:, self._constant_bytes : -blocks].int()
        weights = F.embedding(codes, pairs).view(len(groups), blocks, BLOCK)
        roots = groups[:, -blocks:] * constants[:, 1:] + constants[:, :1]
        squares = roots * roots
        target.view(weights.shape).copy_(weights.mul_((squares * squares).unsqueeze(-1)))


class _Int8(QuantFormat):
    name, _constant_bytes, _block_bytes = "int8", 0, BLOCK + 2

    def _quantized(self, weights: Tensor) -> Tensor:
        scales = (weights.abs().amax(-1) / 127).bfloat16()
        divisors = scales.float().unsqueeze(-1)
        codes = (weights / torch.where(divisors > 0, divisors, 1.0)).round().clamp(-127, 127)
        codes = torch.where(divisors > 0, codes, 0.0).to(torch.int8).view(torch.uint8)
        return torch.cat((codes.flatten(1), scales.view(torch.uint8)), -1)

    def dequantize_into(self, target: Tensor, groups: Tensor, blocks: int, pairs: Tensor) -> None:
        codes, scale_bytes = groups[:, : blocks * BLOCK], groups[:, blocks * BLOCK :]
        weights = codes.view(torch.int8).float().view(len(groups), blocks, BLOCK)
        scales = scale_bytes.reshape(-1).view(torch.bfloat16).view(len(groups), blocks, 1)
        target.view(weights.shape).copy_(weights.mul_(scales))


class _Float32(QuantFormat):
    """A format that stores weights unchanged, as other tools load them."""

    name, _constant_bytes, _block_bytes = "float32", 0, 4 * BLOCK

    def _quantized(self, weights: Tensor) -> Tensor:
        return weights.flatten(1).contiguous().view(torch.uint8)

    def dequantize_into(self, target: Tensor, groups: Tensor, blocks: int, pairs: Tensor) -> None:
        target.view(len(groups), -1).copy_(groups.view(torch.float32))


NF4, INT8 = _Nf4(), _Int8()
QUANT_FORMATS: dict[str, QuantFormat] = {each.name: each for each in (NF4, INT8, _Float32())}


@lru_cache
def code_pairs(device: torch.device) -> Tensor:
    """Return the values of both codes of each byte, (256, 2)."""
    values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), -1)


def dequantize_parts(target: Tensor, groups: Tensor, blocks: int, parts: int, quant: str) -> None:
    """Write the weights of `groups`, as in `dequantize_into`, in equal parts.

    A fused kernel needs no memory for parts. It is compiled for sizes from 2.
    """
    pairs = code_pairs(groups.device)
    if is_fusing(groups.device) and len(groups) > 1 and quant in (NF4.name, INT8.name):
        run_fused(QUANT_FORMATS[quant].dequantize_groups, target, groups.view(-1), pairs)
        return
    for weights, part in zip(target.chunk(parts), groups.chunk(parts), strict=True):
        QUANT_FORMATS[quant].dequantize_into(weights, part, blocks, pairs)


# ---- operators ---------------------------------------------------------------------------
# Without custom operators, torch.compile would find that forward and backward dequantize the
# same weights, and would save them until backward.


def _linear(
    x: Tensor, stored: Tensor, bias: Tensor | None, shape: list[int], transposed: bool, quant: str
) -> Tensor:
    weight = QUANT_FORMATS[quant].dequantize(stored, shape, x.dtype)
    return F.linear(x, weight.t() if transposed else weight, bias)


def _linear_backward(
    gradient: Tensor, stored: Tensor, shape: list[int], transposed: bool, quant: str
) -> Tensor:
    weight = QUANT_FORMATS[quant].dequantize(stored, shape, gradient.dtype)
    return gradient.matmul(weight.t() if transposed else weight)


def fake_product(x: Tensor, *args: Any) -> Tensor:
    """Return (..., out features) without values; arguments end with shape, transposed, format."""
    shape, transposed, _ = args[-3:]
    return x.new_empty(*x.shape[:-1], shape[-2:][transposed])


def fake_input_gradient(gradient: Tensor, *args: Any) -> Tensor:
    """Return (..., in features) without values; see `fake_product`."""
    shape, transposed, _ = args[-3:]
    return gradient.new_empty(*gradient.shape[:-1], shape[-2:][not transposed])


DEQUANTIZE = operator("dequantize", dequantize_parts, None, writes=["target"])
_FORWARD = operator("quantized_linear", _linear, fake_product)
_BACKWARD = operator("quantized_linear_backward", _linear_backward, fake_input_gradient)


class _QuantizedLinear(torch.autograd.Function):
    """A linear layer that saves its quantized bytes for backward, not the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        ctx.save_for_backward(stored)
        ctx.args = args
        return _FORWARD(x, stored, bias, *args)  # type: ignore[no-any-return]  # torch is untyped here

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (stored,) = ctx.saved_tensors
        return (_BACKWARD(gradient, stored, *ctx.args), *[None] * (2 + len(ctx.args)))


class QuantizedModule(nn.Module):
    """A module with weights that may be quantized."""

    quant_format: QuantFormat | None

    def quantized_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the quantized weights, by the parameter's name."""
        raise NotImplementedError


class FrozenLinear(QuantizedModule):
    """A linear layer that LoRA freezes, with another layer's bias and weight, maybe quantized."""

    def __init__(self, base: Any, *, is_transposed: bool) -> None:
        """Take over the parameters of `base`, whose weight is (in, out) if `is_transposed`."""
        super().__init__()
        self.is_transposed = is_transposed
        self.weight, self.bias = base.weight, base.bias
        is_same = isinstance(base, FrozenLinear)
        self.rows, self.columns = (base.rows, base.columns) if is_same else base.weight.shape
        self.quant_format = base.quant_format if is_same else None

    def quantize(self, quant_format: QuantFormat) -> None:
        """Replace the weight by an uninitialized quantized one."""
        self.quant_format = quant_format
        self.weight = quant_format.empty(self.rows * self.columns, self.weight.device)

    def quantized_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {} if self.quant_format is None else {"weight": (self.rows, self.columns)}

    def forward(self, x: Tensor) -> Tensor:
        if self.quant_format is None:
            return F.linear(x, self.weight.t() if self.is_transposed else self.weight, self.bias)
        options = ([self.rows, self.columns], self.is_transposed, self.quant_format.name)
        return _QuantizedLinear.apply(x, self.weight, self.bias, *options)  # type: ignore[no-any-return,no-untyped-call]  # torch is untyped here


class UninitializedLinear(nn.Linear):
    """A linear layer that is not initialized when it is built, but later, by parameter name."""

    def reset_parameters(self) -> None:
        """Do nothing: the parameters are on the meta device."""


def quantized_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the quantized weights, by the parameter's name."""
    return {
        f"{name}.{key}" if name else key: shape
        for name, each in module.named_modules()
        if isinstance(each, QuantizedModule)
        for key, shape in each.quantized_shapes().items()
    }


def quant_format_of(module: nn.Module) -> QuantFormat | None:
    formats = (each.quant_format for each in module.modules() if isinstance(each, QuantizedModule))
    return next(filter(None, formats), None)


def count_weights(module: nn.Module) -> dict[str, int]:
    """Return the number of weights of each parameter, not of bytes if it is quantized."""
    shapes = quantized_shapes(module)
    return {name: prod(shapes.get(name, param.shape)) for name, param in module.named_parameters()}
