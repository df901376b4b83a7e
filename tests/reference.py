"""Trains in one process, without sharding, as all ranks together should.

Each rank's micro-batches are run separately and their gradients summed per rank; the ranks' sums
are added in rank order and multiplied by 1/W; then torch's own AdamW steps. Its parameters are
padded with zeros to 64 elements, because torch's fused kernel on the CPU rounds the last elements
of a tensor differently from those before them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batches = Sequence[Sequence[Sequence[Tensor]]]  # [step][rank][micro-step]
WEIGHT_DECAY = 0.1  # the default of fsdpctl's optimizers
Loss = Callable[[nn.Module, Tensor], Tensor]


class PaddedAdamW:
    """torch.optim.AdamW over copies of the parameters, each padded to a multiple of 64."""

    def __init__(
        self, params: dict[str, nn.Parameter], lr: float, weight_decay: float, *, eps: float = 1e-8
    ) -> None:
        self._params = params
        self._padded = {name: nn.Parameter(_padded(param)) for name, param in params.items()}
        decays = {name: _decays(name, param) for name, param in params.items()}
        decay: list[Tensor] = [self._padded[name] for name in params if decays[name]]
        plain: list[Tensor] = [self._padded[name] for name in params if not decays[name]]
        groups: list[dict[str, object]] = [
            {"params": decay}, {"params": plain, "weight_decay": 0.0},
        ]  # fmt: skip
        self._optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=weight_decay, fused=True
        )

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> None:
        """Step with the given mean gradients; parameters without one are left alone."""
        for name, padded in self._padded.items():
            gradient = gradients.get(name)
            padded.grad = None if gradient is None else _padded(gradient)
        self._optimizer.step()
        for name, param in self._params.items():
            param.copy_(self._padded[name][: param.numel()].view(param.shape))


def _decays(name: str, param: Tensor) -> bool:
    """Whether weight decay applies: not to vectors or stacked ones (expert biases, Mamba rates)."""
    *owners, last = name.split(".")
    is_elementwise = any(arg in last for arg in ("bias", "scale", "gamma", "A_log"))
    may_be_row = last != "weight" or param.ndim > 2  # such as a token; not a linear layer's weight
    is_row = may_be_row and param.numel() == max(param.shape, default=1)
    return param.ndim > 1 and not (is_elementwise or is_row or "norm" in "".join(owners[-1:]))


def _padded(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    padded = flat.new_zeros(-(-flat.numel() // 64) * 64)
    padded[: flat.numel()] = flat
    return padded


def train_reference(
    module: nn.Module, loss_of: Loss, batches: Batches, *, lr: float = 1e-2, max_norm: float = 0.0,
    divides_after: bool = False, make_optimizer: Callable[..., Any] = PaddedAdamW,
) -> dict[str, Tensor]:  # fmt: skip
    """Train `module` in this process and return its state.

    The losses of several micro-batches are divided by their number. With `divides_after` the
    reduced gradients are divided instead, as if the number is not known beforehand.
    """
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(params, lr, WEIGHT_DECAY)
    for of_ranks in batches:
        totals = _summed_gradients(module, params, loss_of, of_ranks, not divides_after)
        if divides_after:
            totals = {name: total * (1 / len(of_ranks[0])) for name, total in totals.items()}
        if max_norm:
            _clip(totals, max_norm)
        optimizer.step(totals)
    return {name: value.clone() for name, value in module.state_dict().items()}


def _summed_gradients(
    module: nn.Module, params: dict[str, nn.Parameter], loss_of: Loss,
    of_ranks: Sequence[Sequence[Tensor]], divides_losses: bool,
) -> dict[str, Tensor]:  # fmt: skip
    totals: dict[str, Tensor] = {}
    for micro_batches in of_ranks:
        module.zero_grad()
        for micro_batch in micro_batches:
            count = len(micro_batches) if divides_losses else 1
            (loss_of(module, micro_batch) / count).backward()
        for name, param in params.items():
            if param.grad is not None:
                totals[name] = totals[name] + param.grad if name in totals else param.grad.clone()
    if len(of_ranks) > 1:
        totals = {name: total * (1 / len(of_ranks)) for name, total in totals.items()}
    return totals


def _clip(gradients: dict[str, Tensor], max_norm: float) -> None:
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    for gradient in gradients.values():
        gradient.mul_(factor)
