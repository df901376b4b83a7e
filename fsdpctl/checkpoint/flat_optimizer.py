"""An elementwise optimizer of torch on a model's flat parameters, as checkpoints see it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import Span
from fsdpctl.shards import FlatShard, Sharded, trainable_shards

_STEP = "step"


@dataclass(frozen=True, slots=True)
class _WholeShard:
    """What it steps as one tensor."""

    shard: FlatShard
    span: Span


class FlatOptimizer:
    """Its states lie next to the elements of the shards."""

    def __init__(
        self, model: Sharded, optimizer: Optimizer, kinds: Collection[str] = (), *, counts: bool
    ) -> None:
        """Of `optimizer`, made of `model.flat_parameters()`.

        Args:
            model: a sharded model.
            optimizer: any elementwise one.
            kinds: names of the states that `create_states` makes.
            counts: whether steps are counted too.

        Raises:
            UsageError: it is of other parameters.
        """
        self._optimizer, self._kinds, self._counts = optimizer, kinds, counts
        given = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._shards = [each for each in trainable_shards(model) if id(each.param) in given]
        if given - {id(each.param) for each in self._shards}:
            raise UsageError(
                f"{type(optimizer).__name__}: only ShardedAdamW(model) and optimizers made of "
                "model.flat_parameters() can be saved and loaded"
            )

    def isolate(self, names: Collection[str]) -> None:
        """Nothing: it steps whole shards."""

    def create_states(self) -> None:
        """Make states of zeros."""
        for shard in self._shards:
            state = self._optimizer.state[shard.param]
            state.update({kind: torch.zeros_like(shard.param) for kind in self._kinds})
            if self._counts:
                state[_STEP] = torch.zeros((), dtype=torch.float32)

    def run_states(self) -> Iterator[tuple[_WholeShard, dict[str, Tensor]]]:
        """Each shard with its states.

        Raises:
            UsageError: one of them is not of the shape of the shard.
        """
        for shard in self._shards:
            found = {
                name: value
                for name, value in self._optimizer.state[shard.param].items()
                if isinstance(value, Tensor)
            }
            for name, value in found.items():
                if name != _STEP and value.shape != shard.param.shape:
                    raise UsageError(
                        f"{type(self._optimizer).__name__}: its {name} is no number for each "
                        "element, so it cannot be saved in parts"
                    )
            yield _WholeShard(shard, shard.held), found
