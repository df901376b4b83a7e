"""AdamW over flat shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdpctl.optim.sharded import ShardedSteps
from fsdpctl.shards import Sharded


class ShardedAdamW(ShardedSteps, torch.optim.AdamW):
    """torch's fused AdamW on this rank's shards; schedulers work on it as on any optimizer.

    Its defaults are those of language models: betas 0.9 and 0.95, weight decay 0.1, where torch's
    AdamW has 0.999 and 0.01. Vectors and scalars (norms, biases) in no group of the caller's get no
    weight decay. Adam's moments have the masters' dtype and lie next to the elements they belong
    to, so each rank keeps only those of its shards.
    """

    def __init__(
        self,
        model: Sharded,
        *,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        param_groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Make an optimizer for all trainable parameters of `model`.

        Args:
            model: a sharded model.
            lr: learning rate.
            betas: decay rates of the first and second moment.
            eps: added to the denominator.
            weight_decay: decoupled decay of parameters with at least two dimensions.
            param_groups: further groups as `{"names": [...], "lr": ..., ...}`. What one does not
                say is as above, for its vectors and scalars too.

        Raises:
            UsageError: a group names a parameter that the model does not have.
        """
        groups = self._divided(model, param_groups)
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def create_states(self) -> None:
        """Make the states that the first step would make: moments of zero, no steps."""
        for run, _ in self.runs:
            state = self.state[run.param]
            if not state:
                device = run.param.device
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(run.param)
                state["exp_avg_sq"] = torch.zeros_like(run.param)
