"""Experts as Liger's kernels compute them, to trace programs that use these."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.peft import OF_EXPERTS


def fuse_experts(module: nn.Module) -> None:
    """Let stacked experts without biases and adapters run as one operator, in place."""
    for each in module.modules():
        weights = [getattr(each, name, None) for name in ("gate_up_proj", "down_proj")]
        more = (getattr(each, name, None) for name in ("gate_up_proj_bias", OF_EXPERTS.strip(".")))
        if all(extra is None for extra in more) and all(
            isinstance(w, Tensor) and w.ndim == 3 for w in weights
        ):
            each.forward = MethodType(_forward, each)


def _forward(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out: Tensor = _FusedExperts.apply(x, self.gate_up_proj, self.down_proj, weights)  # type: ignore[no-untyped-call]  # torch's
    return out


class _FusedExperts(torch.autograd.Function):
    """The tensors of LigerFusedMoEFunction 0.8.5, which keeps only the products before the gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: Tensor, back: Tensor, weights: Tensor) -> Tensor:
        ends = x.new_empty(len(into), dtype=torch.int32)
        before = F.grouped_mm(_rows(x, weights), into.transpose(-2, -1), offs=ends)
        gated = x.new_empty(weights.numel(), back.shape[-1])
        F.grouped_mm(_rows(gated, weights), back.transpose(-2, -1), offs=ends)
        ctx.save_for_backward(x, into, back, weights, before, ends)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, into, back, weights, before, ends = ctx.saved_tensors
        rows = _rows(gradients[0], weights)
        of_before = _rows(torch.empty_like(before), weights)
        gated = F.grouped_mm(rows, back, offs=ends)
        of_back = F.grouped_mm(rows.transpose(0, 1), gated, offs=ends)
        expanded = F.grouped_mm(of_before, into, offs=ends)
        of_x = torch.zeros_like(x)
        del expanded
        of_into = F.grouped_mm(of_before.transpose(0, 1), _rows(x, weights), offs=ends)
        return of_x, of_into, of_back, torch.empty_like(weights)


def _rows(x: Tensor, weights: Tensor) -> Tensor:
    """Return a row for each choice of an expert, without memory: the kernel finds it by index."""
    return x.as_strided((weights.numel(), x.shape[-1]), (0, 1))
