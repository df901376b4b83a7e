"""Stochastic gradient descent over flat shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpctl.comm.flat_shard import ShardedModelProtocol
from fsdpctl.errors import UsageError
from fsdpctl.optim.sharded import ShardedOptimizerMixin, SteppedSpan


class ShardedSGD(ShardedOptimizerMixin, torch.optim.SGD):
    """torch's SGD on this rank's shards, which works with any learning-rate scheduler.

    Weight decay is added to the gradient, as in torch. Vectors and scalars that are in no group of
    `param_groups` have no weight decay. Momentum stores one number per element.
    """

    def __init__(
        self,
        model: ShardedModelProtocol,
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
            UsageError: If a group names an unknown parameter, masters have 24 bits, or masters have
                16 bits on a CPU, where torch's fused kernel does not step all elements.
        """
        groups = self._param_groups(model, param_groups)
        for stepped in self.spans:
            is_narrow = stepped.param.device.type == "cpu" and stepped.param.itemsize < 4
            if is_narrow or stepped.shard.remainder is not None:
                bits = "16 bits on a CPU" if stepped.shard.remainder is None else "24 bits"
                way = "set master_dtype=torch.float32, or use ShardedAdamW"
                raise UsageError(f"ShardedSGD: master weights of {bits} are not supported; {way}")
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)

    def _before_step(self) -> None:
        self.create_states()  # torch leaves new states uninitialized if the first step is skipped

    def _new_state(self, stepped: SteppedSpan) -> dict[str, Tensor]:
        has_momentum = self.param_groups[stepped.group_index]["momentum"]
        return {"momentum_buffer": torch.zeros_like(stepped.param)} if has_momentum else {}
