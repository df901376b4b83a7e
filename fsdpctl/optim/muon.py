"""Muon for the hidden matrices, and AdamW for all other parameters."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdpctl.comm.flat_shard import ShardedModelProtocol
from fsdpctl.errors import UsageError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.sharded import SteppedSpan
from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.optimizers import MATRICES, NS_STEPS, uses_muon

# The coefficients and the epsilon of torch.optim.Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


class ShardedMuon(ShardedAdamW):
    """torch's Muon for the matrices of blocks, and fused AdamW for everything else.

    Both have one learning rate. For a matrix it is multiplied by 0.2 times the square root of the
    longer side, as by torch's `match_rms_adamw`. Each rank steps the matrices that it owns, without
    communication. Like torch.optim.Muon, it updates a fused parameter (queries, keys and values) as
    one matrix.
    """

    steps_on_host = False

    def __init__(
        self,
        model: ShardedModelProtocol,
        *,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = NS_STEPS,
        **adamw: Any,
    ) -> None:
        """Create an optimizer for all trainable parameters of `model`.

        Args:
            model: A sharded model that cuts no matrix of a block.
            lr: The learning rate.
            momentum: The decay rate of the mean gradient of matrices.
            nesterov: Whether to use Nesterov momentum.
            ns_steps: The number of Newton-Schulz iterations that make an update orthogonal.
            adamw: The other arguments of `ShardedAdamW`. Its `weight_decay` and `param_groups` also
                apply to matrices.

        Raises:
            UsageError: If shards split a matrix, the model has no matrix for Muon, or masters are
                in host memory or have 24 bits.
        """
        self._momentum, self._nesterov, self._ns_steps = momentum, nesterov, ns_steps
        super().__init__(model, lr=lr, **adamw)
        if self._dtype is not None:
            raise UsageError(
                "ShardedMuon: state_dtype and master weights of 24 bits are not supported; use "
                "ShardedAdamW"
            )
        for run, _ in self.spans:
            matrix = run.separate_param
            if matrix is not None and run.span.numel < matrix.numel:
                raise UsageError(
                    f"ShardedMuon: {matrix.name} is cut between ranks; shard the model with "
                    f'strategy="shard_optimizer" and owner_map="{MATRICES}", or "no_shard"'
                )
        if not any(uses_muon(p) for shard in model.flat_shards() for p in shard.layout.params):
            problem = "the model has no trainable matrix in a repeated block; use ShardedAdamW"
            raise UsageError(f"ShardedMuon: {problem}")

    def _is_separate(self, param: ParamSpec) -> bool:
        return uses_muon(param)

    def _new_state(self, run: SteppedSpan, group: Mapping[str, Any]) -> dict[str, Tensor]:
        if run.separate_param is None:
            return super()._new_state(run, group)
        return {"momentum_buffer": torch.zeros_like(run.param)}

    def _before_step(self) -> None:
        """Step the matrices, and drop their gradients so that AdamW does not step them."""
        for run, group_index in self.spans:
            if run.separate_param is None or run.param.grad is None:
                continue
            group, state = self.param_groups[group_index], self.state[run.param]
            if not state:
                state.update(self._new_state(run, group))
            values = run.param.detach(), run.param.grad, state["momentum_buffer"]
            self._step_matrices(run.separate_param, *values, group)
            run.param.grad = None

    def _step_matrices(
        self, spec: ParamSpec, param: Tensor, grad: Tensor, mean: Tensor, group: Mapping[str, Any]
    ) -> None:
        """Step a parameter; all tensors are 1-D. If `found_inf` is set, nothing changes."""
        lr, skips = float(group["lr"]), self.found_inf
        decay = param.new_full((), 1 - lr * group["weight_decay"])
        if self.grad_scale is not None:
            grad.div_(self.grad_scale)
        if skips is not None:
            skips = skips.bool()
            torch.where(skips, mean, grad, out=grad)
            decay.masked_fill_(skips, 1.0)
        mean.lerp_(grad, 1 - self._momentum)
        param.mul_(decay)
        weights, gradient, average = (v[: spec.numel].view(spec.shape) for v in (param, grad, mean))
        update = _orthogonal(self._update(gradient, average), self._ns_steps)
        if skips is not None:
            update.masked_fill_(skips, 0.0)
        weights.add_(update, alpha=-lr * (0.2 * math.sqrt(max(update.shape[-2:]))))

    def _update(self, gradient: Tensor, mean: Tensor) -> Tensor:
        if self._nesterov:
            return gradient.lerp(mean, self._momentum).bfloat16()
        return mean.to(torch.bfloat16, copy=True)


def _orthogonal(x: Tensor, steps: int) -> Tensor:
    """Return approximately the orthogonal matrix nearest to `x`, as torch.optim.Muon does.

    `x` is a bfloat16 matrix, or a stack of matrices, and is overwritten.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x.div_(norm.clamp_(min=_EPS))
    multiply = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply(gram, gram, gram, beta=_B, alpha=_C)
        del gram
        x = multiply(x, polynomial, x, beta=_A)
        del polynomial
    return x.mT if is_tall else x
