"""AdamW over flat shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpctl.optim.sharded import ShardedSteps
from fsdpctl.shards import Sharded


class ShardedAdamW(ShardedSteps, torch.optim.AdamW):
    """torch's fused AdamW on this rank's shards, which works with any learning-rate scheduler.

    Its defaults are common for language models: betas 0.9 and 0.95 and weight decay 0.1, unlike
    0.999 and 0.01 in torch. Vectors and scalars (norms, biases) that are in no group of
    `param_groups` have no weight decay. Each rank keeps Adam's moments of its shards only, in the
    masters' dtype.
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
        """Create an optimizer for all trainable parameters of `model`.

        Args:
            model: A sharded model.
            lr: The learning rate.
            betas: The decay rates of the first and second moment.
            eps: The constant added to the denominator.
            weight_decay: The decoupled decay of parameters with at least two dimensions.
            param_groups: More groups as `{"names": [...], "lr": ..., ...}`. Missing options have
                the values above, also for vectors and scalars.

        Raises:
            UsageError: If a group names an unknown parameter.
        """
        groups = self._divided(model, param_groups)
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def _new_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **moments}
