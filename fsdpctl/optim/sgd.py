"""Stochastic gradient descent over flat shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpctl.comm.shards import Sharded
from fsdpctl.optim.sharded import ShardedSteps, SteppedRun


class ShardedSGD(ShardedSteps, torch.optim.SGD):
    """torch's fused SGD on this rank's shards, which works with any learning-rate scheduler.

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
            UsageError: If a group names an unknown parameter.
        """
        groups = self._divided(model, param_groups)
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)

    def _before_step(self) -> None:
        # torch would leave them uninitialized if its first step is skipped.
        self.create_states()

    def _new_state(self, run: SteppedRun, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(run.param)} if group["momentum"] else {}
