"""What each sharding strategy keeps on a rank, and for how long: one row per strategy."""

from dataclasses import dataclass

from fsdpctl.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class Strategy:
    """Which model states a rank keeps only its part of."""

    name: str
    known_as: str
    shards_params: bool  # between steps
    reshard_after_forward: bool  # gathered again in backward, less held in between
    shards_grads: bool  # once reduced
    shards_optimizer: bool  # states and master weights
    replicates: bool  # one copy per group of `dp_shard_size` ranks
    runs: bool  # whether this version's engine executes it

    @property
    def keeps_whole_params(self) -> bool:
        """Whether the parameters stay whole on every rank between steps."""
        return not self.shards_params


_TABLE = (
    #        name, known as, shards params, reshards, shards grads, optimizer, replicates, runs
    Strategy("no_shard", "DDP", False, False, False, False, False, True),
    Strategy("shard_optimizer", "ZeRO-1", False, False, True, True, False, False),
    Strategy("shard_grad_op", "ZeRO-2", True, False, True, True, False, True),
    Strategy("full_shard", "ZeRO-3, FSDP", True, True, True, True, False, True),
    Strategy("hybrid_shard", "HSDP", True, True, True, True, True, False),
    Strategy("hybrid_shard_grad_op", "HSDP, ZeRO-2", True, False, True, True, True, False),
)

STRATEGIES: dict[str, Strategy] = {row.name: row for row in _TABLE}


def get_strategy(name: str) -> Strategy:
    """The strategy called `name`.

    Raises:
        UsageError: no strategy has that name, or this version cannot run it yet.
    """
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise UsageError(f"strategy={name}: no such strategy{nearest(name, STRATEGIES)} ({known})")
    strategy = STRATEGIES[name]
    if not strategy.runs:
        runs = ", ".join(row.name for row in _TABLE if row.runs)
        raise UsageError(f"strategy={name}: planned, but does not run in this version ({runs} do)")
    return strategy


def effective_strategy(strategy: Strategy, num_ranks: int) -> Strategy:
    """What really runs on `num_ranks` ranks: a single rank has nobody to share with."""
    return strategy if num_ranks > 1 else STRATEGIES["no_shard"]
