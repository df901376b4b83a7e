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

    @property
    def keeps_whole_params(self) -> bool:
        """Whether the parameters stay whole on every rank between steps."""
        return not self.shards_params

    @property
    def has_owner_map(self) -> bool:
        """Whether it is free which rank steps which elements."""
        return self.shards_optimizer and not self.shards_params


_TABLE = (
    #        name, known as, shards params, reshards, shards grads, optimizer, replicates
    Strategy("no_shard", "DDP", False, False, False, False, False),
    Strategy("shard_optimizer", "ZeRO-1", False, False, True, True, False),
    Strategy("shard_grad_op", "ZeRO-2", True, False, True, True, False),
    Strategy("full_shard", "ZeRO-3, FSDP", True, True, True, True, False),
    Strategy("hybrid_shard", "HSDP", True, True, True, True, True),
    Strategy("hybrid_shard_grad_op", "HSDP, ZeRO-2", True, False, True, True, True),
)

STRATEGIES: dict[str, Strategy] = {row.name: row for row in _TABLE}


# How other tools call strategies -> ours.
STRATEGIES_ELSEWHERE = {
    "ddp": "no_shard",
    "zero1": "shard_optimizer",
    "zero2": "shard_grad_op",
    "zero3": "full_shard",
    "fsdp": "full_shard",
    "hsdp": "hybrid_shard",
}


def get_strategy(name: str) -> Strategy:
    """The strategy called `name`, here or elsewhere.

    Raises:
        UsageError: no strategy has that name.
    """
    name = STRATEGIES_ELSEWHERE.get(name.lower(), name)
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise UsageError(f"strategy={name}: no such strategy{nearest(name, STRATEGIES)} ({known})")
    return STRATEGIES[name]


def with_resharding(name: str, reshards: bool) -> Strategy:
    """The strategy like `name` that frees parameters after forward, or keeps them until backward.

    Raises:
        UsageError: there is no such strategy, or it has nothing to free.
    """
    like = get_strategy(name)
    for row in STRATEGIES.values():
        same = row.replicates == like.replicates and row.shards_params and like.shards_params
        if same and row.reshard_after_forward == reshards:
            return row
    raise UsageError(
        f"strategy={like.name}: parameters are whole at all times, so reshard_after_forward has "
        "nothing to say"
    )


def effective_strategy(strategy: Strategy, copy_size: int, world_size: int) -> tuple[Strategy, int]:
    """What really runs where `copy_size` ranks share a copy, and how many share its buffers.

    One rank alone shares nothing: then every copy is whole, and all ranks replicate it.
    """
    if copy_size > 1:
        return strategy, copy_size
    return STRATEGIES["no_shard"], world_size


def ranks_per_copy(strategy: Strategy, world_size: int, dp_shard_size: int | None) -> int:
    """How many ranks share one copy of the model.

    Raises:
        UsageError: `dp_shard_size` does not divide the number of ranks, or is given to a strategy
            without replicas.
    """
    if not strategy.replicates:
        if dp_shard_size is not None:
            raise UsageError(
                f"strategy.dp_shard_size={dp_shard_size}: only hybrid strategies have one, and "
                f"{strategy.name} is none"
            )
        return world_size
    size = dp_shard_size or world_size
    if world_size % size:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise UsageError(
            f"strategy.dp_shard_size={size}: must divide the {world_size} ranks ({divisors})"
        )
    return size
