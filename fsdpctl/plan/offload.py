"""The model states that are in host memory."""

from enum import Flag, auto
from functools import reduce
from operator import or_

from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES, Strategy


class Offload(Flag):
    """A set of model states that are in host memory."""

    NONE = 0
    STATES = auto()  # master weights and moments, which are stepped there
    GRADIENTS = auto()  # reduced ones
    PARAMS = auto()  # frozen ones at rest; with states, trained ones too
    ALL = STATES | GRADIENTS | PARAMS

    @classmethod
    def parse(cls, text: str) -> "Offload":
        """Return the states that a word, or a list of words with or without brackets, names."""
        words = [each.strip().upper() for each in text.strip("[] ").split(",")]
        if not all(each in cls.__members__ for each in words):
            raise UsageError(
                f"strategy.offload={text}: expected none, all, or a list of states, gradients, "
                "params"
            )
        found = reduce(or_, (cls[each] for each in words))
        if cls.GRADIENTS in found and cls.STATES not in found:
            raise UsageError(f"strategy.offload={text}: gradients require states; add states")
        return found

    def __str__(self) -> str:
        return str(self.name).lower().replace("|", ",")

    def refusal(self, asked: Strategy, runs: Strategy, num_ranks: int) -> str:
        """Return why this is impossible under a strategy that runs as another; empty if it isn't.

        A rank gathers units from its part of the parameters, and should step what others don't.
        """
        if self.PARAMS in self and not asked.can_offload_params:
            able = ", ".join(n for n, row in STRATEGIES.items() if row.can_offload_params)
            return f"params: not supported with strategy={asked.name}; expected {able}"
        if self.STATES in self and num_ranks > 1 and not runs.shards_optimizer:
            alone = " strategy.dp_shard_size=1" if asked.replicates else ""
            return (
                f"not supported with strategy={asked.name}{alone} on {num_ranks} ranks, which "
                "would all step all parameters; expected a strategy that shards optimizer states, "
                "such as shard_grad_op"
            )
        return ""

    def check_rests(self, *, trains_all: bool) -> None:
        """Check that some parameters rest on the host if they may."""
        if self is Offload.PARAMS and trains_all:
            raise UsageError(
                "strategy.offload=params: trained parameters rest on the host with their master "
                "weights; expected states,params or all, or frozen parameters, as with model.lora"
            )
