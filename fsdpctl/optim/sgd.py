"""Stochastic gradient descent over flat shards.

Note: 16-bit masters on a CPU. torch's fused kernel only changes those behind the last full vector.
Its other implementation rounds the updates of these once more, so that they depend on where a shard
ends. `_step_narrow` steps all as that one steps the others: the same bits on any number of ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpctl.comm.shards import Sharded
from fsdpctl.errors import UsageError
from fsdpctl.optim.sharded import ShardedSteps, SteppedRun


class ShardedSGD(ShardedSteps, torch.optim.SGD):
    """torch's SGD on this rank's shards, which works with any learning-rate scheduler.

    Weight decay is added to the gradient, as in torch. Vectors and scalars that are in no group of
    `param_groups` have none. Momentum takes one number per element.
    """

    def __init__(
        self,
        model: Sharded,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        param_groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Create an optimizer for all trainable parameters of `model`.

        Args:
            model: A sharded model.
            lr: The learning rate.
            momentum: The factor of the last update in the next one; 0 keeps no state.
            weight_decay: The decay of parameters with at least two dimensions.
            param_groups: More groups as `{"names": [...], "lr": ..., ...}`.

        Raises:
            UsageError: If a group names an unknown parameter, or masters have 24 bits.
        """
        groups = self._divided(model, param_groups)
        if any(run.shard.remainder is not None for run, _ in self.runs):
            raise UsageError(
                "ShardedSGD: master weights of 24 bits (has_remainders) are not supported; use "
                "ShardedAdamW"
            )
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)

    def _before_step(self) -> None:
        """Step 16-bit masters on a CPU, which torch leaves alone without their gradients."""
        self.create_states()  # torch's stay uninitialized if the first step is skipped
        for run, number in self.runs:
            param, grad = run.param.detach(), run.param.grad
            if grad is None or param.device.type != "cpu" or param.itemsize > 2:
                continue
            run.param.grad = None
            if self.found_inf is not None and self.found_inf.item():
                continue
            if self.grad_scale is not None:
                grad.div_(self.grad_scale)
            mean = self.state[run.param].get("momentum_buffer")
            _step_narrow(param, grad, mean, self.param_groups[number])

    def _new_state(self, run: SteppedRun, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(run.param)} if group["momentum"] else {}


def _step_narrow(
    param: Tensor, grad: Tensor, mean: Tensor | None, group: Mapping[str, Any]
) -> None:
    """Step a parameter of 16 bits as torch.optim.SGD does, which rounds each factor to them."""
    rounded = param.new_tensor
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"]:
        grad = grad.addcmul(param, rounded(group["weight_decay"]))
    if mean is not None:
        mean.mul_(group["momentum"]).addcmul_(grad, rounded(1 - group["dampening"]))
        grad = grad.addcmul(mean, rounded(group["momentum"])) if group["nesterov"] else mean
    param.addcmul_(grad, rounded(-float(group["lr"])))
