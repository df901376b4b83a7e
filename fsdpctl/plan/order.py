"""The order in which the units of a model run, and what each of them needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpctl.plan.strategy import Strategy


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """The units other than the root in forward order, and their properties."""

    root: str
    forward: tuple[str, ...]
    needs_no_backward_gather: frozenset[str] = frozenset()  # the embedding reads no weights there
    frozen: frozenset[str] = frozenset()  # units without a trained parameter
    blocks: frozenset[str] = frozenset()  # the repeated units
    before_all_trained: frozenset[str] = frozenset()  # units without a backward

    @property
    def gone_back_through(self) -> tuple[str, ...]:
        """The units that have a backward, in backward order."""
        return tuple(u for u in reversed(self.forward) if u not in self.before_all_trained)

    @property
    def backward(self) -> tuple[str, ...]:
        """The units gathered for backward, in that order."""
        return tuple(unit for unit in reversed(self.forward) if self._reads_weights(unit))

    @property
    def reduction(self) -> tuple[str, ...]:
        """The order in which all ranks start the reductions."""
        return (*reversed(self.forward), self.root)

    @property
    def reduced_early(self) -> frozenset[str]:
        """The units that are reduced before the last backward of the pass."""
        return frozenset(self.forward[1:])

    def trains(self, unit: str) -> bool:
        """Return whether a unit has gradients."""
        return unit not in self.frozen

    def keeps_after_forward(self, unit: str, strategy: Strategy) -> bool:
        """Return whether a unit stays unsharded from its forward to its backward."""
        if not self._reads_weights(unit):
            return False
        return not strategy.reshard_after_forward or unit == self.forward[-1]

    def is_gathered_again(self, unit: str, strategy: Strategy) -> bool:
        """Return whether backward gathers a unit, if parameters are sharded."""
        keeps = self.keeps_after_forward(unit, strategy)
        return self._reads_weights(unit) and not keeps

    def _reads_weights(self, unit: str) -> bool:
        """Return whether a unit has a backward that reads its weights."""
        return unit not in self.before_all_trained and unit not in self.needs_no_backward_gather


def all_following(order: Sequence[str], depth: int) -> dict[str, tuple[str, ...]]:
    """Map each unit to the `depth` units that follow it in `order`."""
    return {unit: tuple(order[index + 1 : index + 1 + depth]) for index, unit in enumerate(order)}
