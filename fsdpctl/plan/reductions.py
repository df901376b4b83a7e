"""How many gradients may be on their way at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdpctl.plan.layout import FlatLayout

Itemsize = Callable[[FlatLayout], int]  # bytes of one element of a flat buffer


@dataclass(frozen=True, slots=True)
class Reductions:
    """How gradients are reduced."""

    nbytes: Mapping[str, int]  # of every unit's gradients, as they are reduced
    budget: int  # how many bytes may be on their way before one reduction is waited for
    stays: bool = False  # whether a first sum stays in the buffer that it was added in

    def fits(self, unit: str, others: Iterable[str], *, is_first: bool = False) -> bool:
        """Whether `unit` may be on its way together with `others`.

        `is_first` says that there is no earlier gradient to add to: a sum that stays costs nothing.
        """
        if self.stays and is_first:
            return True
        sizes = [self.nbytes[each] for each in others]
        return not sizes or sum(sizes, self.nbytes[unit]) <= self.budget


def plan_reductions(
    layouts: Mapping[str, Sequence[FlatLayout]],
    itemsize: Itemsize,
    *,
    stays: bool = False,
) -> Reductions:
    """Let as much be on its way as the largest unit has, or twice that where it has two bytes each.

    Two reductions of two bytes an element cost what one of four does. The order of collectives
    follows from this, so it depends on nothing that differs between ranks.

    Args:
        layouts: of every unit.
        itemsize: bytes of one element, as it is reduced.
        stays: whether a first sum stays in the buffer that it was added in.
    """
    trained = {
        name: [layout for layout in of_unit if layout.params[0].trainable]
        for name, of_unit in layouts.items()
    }
    nbytes = {
        name: sum(layout.numel * itemsize(layout) for layout in of_unit)
        for name, of_unit in trained.items()
    }
    widest = max((itemsize(each) for of_unit in trained.values() for each in of_unit), default=4)
    budget = max(nbytes.values()) * (1 if widest > 2 else 2)
    return Reductions(nbytes, budget, stays)
