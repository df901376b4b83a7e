"""What a rank holds of parameters, gradients and optimizer states: exact, from the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout
from fsdpctl.plan.slots import assign_slots
from fsdpctl.plan.strategy import Strategy

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one rank, padding included; activations are not in it."""

    masters: int
    gradients: int
    optimizer: int
    gathered: int  # slots of parameters that compute, at their largest

    @property
    def total(self) -> int:
        """All of it."""
        return self.masters + self.gradients + self.optimizer + self.gathered


def state_bytes(
    layouts: Mapping[str, Sequence[FlatLayout]],
    strategy: Strategy,
    *,
    param_dtype: str,
    master_dtype: str,
    prefetch_depth: int,
) -> StateBytes:
    """The model states of the rank that owns most under AdamW, and its gathered parameters.

    `layouts` are those of every unit, root first.
    """
    rank = _fullest_rank(layouts)
    masters = optimizer = gradients = 0
    nbytes: dict[str, int] = {}
    for name, of_unit in layouts.items():
        nbytes[name] = 0
        for layout in of_unit:
            part = layout.parts[rank].numel
            trainable = layout.params[0].trainable
            master = part if strategy.shards_optimizer else layout.numel
            grad = part if strategy.shards_grads else layout.numel
            masters += master * DTYPE_BYTES[master_dtype]
            gradients += trainable * grad * DTYPE_BYTES[master_dtype]
            optimizer += trainable * 2 * master * DTYPE_BYTES[master_dtype]
            nbytes[name] += layout.numel * DTYPE_BYTES[param_dtype]
    gathered = _gathered_bytes(nbytes, strategy, prefetch_depth)
    if strategy.keeps_whole_params and param_dtype == master_dtype:
        gathered -= masters  # which are windows into the parameters
    return StateBytes(masters, gradients, optimizer, gathered)


def _fullest_rank(layouts: Mapping[str, Sequence[FlatLayout]]) -> int:
    owned = [0] * len(next(layout for each in layouts.values() for layout in each).parts)
    for of_unit in layouts.values():
        for layout in of_unit:
            for rank, part in enumerate(layout.parts):
                owned[rank] += part.numel
    return owned.index(max(owned))


def _gathered_bytes(nbytes: dict[str, int], strategy: Strategy, depth: int) -> int:
    root, *others = nbytes
    if not strategy.reshard_after_forward:
        return sum(nbytes.values())
    return sum(slot.nbytes for slot in assign_slots(nbytes, root, others, depth))
