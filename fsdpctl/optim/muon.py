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
    communication. Like torch.optim.Muon, it updates fused queries, keys and values as one matrix.
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
        if self._tiled_dtype is not None:
            raise UsageError(
                "ShardedMuon: state_dtype and 24-bit masters are not supported; use ShardedAdamW"
            )
        for stepped in self.spans:
            matrix = stepped.separate_param
            if matrix is not None and stepped.span.numel < matrix.numel:
                raise UsageError(
                    f"ShardedMuon: {matrix.name} is cut between ranks; shard the model with "
                    f'strategy="shard_optimizer" and owner_map="{MATRICES}", or "no_shard"'
                )
        if not any(uses_muon(p) for shard in model.flat_shards() for p in shard.layout.params):
            problem = "the model has no trainable matrix in a repeated block; use ShardedAdamW"
            raise UsageError(f"ShardedMuon: {problem}")

    def _is_separate(self, param: ParamSpec) -> bool:
        return uses_muon(param)

    def _new_state(self, stepped: SteppedSpan) -> dict[str, Tensor]:
        if stepped.separate_param is None:
            return super()._new_state(stepped)
        return {"momentum_buffer": torch.zeros_like(stepped.param)}

    def _before_step(self) -> None:
        """Step the matrices, and drop their gradients so that AdamW does not step them."""
        for stepped in self.spans:
            spec, param = stepped.separate_param, stepped.param
            if spec is not None and param.grad is not None:
                mean = self._state_of(stepped)["momentum_buffer"]
                group = self.param_groups[stepped.group_index]
                self._step_param(spec, param.detach(), param.grad, mean, group)
                param.grad = None

    def _step_param(
        self, spec: ParamSpec, param: Tensor, grad: Tensor, mean: Tensor, group: Mapping[str, Any]
    ) -> None:
        """Step a matrix or a stack of matrices. Tensors are 1-D; `found_inf` changes nothing."""
        lr = float(group["lr"])
        skip = None if self.found_inf is None else self.found_inf.bool()
        decay = param.new_full((), 1 - lr * group["weight_decay"])
        if self.grad_scale is not None:
            grad.div_(self.grad_scale)
        if skip is not None:
            torch.where(skip, mean, grad, out=grad)  # then `lerp_` leaves the mean as it is
            decay.masked_fill_(skip, 1.0)
        mean.lerp_(grad, 1 - self._momentum)
        param.mul_(decay)
        without_padding = (x[: spec.numel].view(spec.shape) for x in (param, grad, mean))
        weights, gradient, average = without_padding
        # No name holds the argument, so that `_orthogonal` frees it after the first iteration.
        update = _orthogonal(self._update(gradient, average), self._ns_steps)
        if skip is not None:
            update.masked_fill_(skip, 0.0)
        # The factor of torch's `match_rms_adamw`.
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
