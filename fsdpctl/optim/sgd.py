"""Stochastic gradient descent over flat shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdpctl.optim.sharded import ShardedSteps
from fsdpctl.shards import Sharded


class ShardedSGD(ShardedSteps, torch.optim.SGD):
    """torch's fused SGD on this rank's shards; schedulers work on it as on any optimizer.

    Its weight decay is added to the gradient, as torch's; vectors and scalars in no group of the
    caller's get none. With momentum it keeps one number for each element that it steps.
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
        """Make an optimizer for all trainable parameters of `model`.

        Args:
            model: a sharded model.
            lr: learning rate.
            momentum: the share of the last update in the next one; 0 keeps nothing.
            weight_decay: of parameters with at least two dimensions.
            param_groups: further groups as `{"names": [...], "lr": ..., ...}`.

        Raises:
            UsageError: a group names a parameter that the model does not have.
        """
        groups = self._divided(model, param_groups)
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)

    def _before_step(self) -> None:
        # torch would leave them without values where its first step is skipped.
        self.create_states()

    def create_states(self) -> None:
        """Make the states that the first step would make: momenta of zero."""
        for run, group in self.runs:
            state = self.state[run.param]
            if not state and self.param_groups[group]["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(run.param)
