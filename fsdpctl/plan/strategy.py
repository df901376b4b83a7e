"""What each sharding strategy keeps on a rank, and for how long: one row per strategy."""

from dataclasses import dataclass, replace

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
    shards_over_copies: bool = False  # gradients, states and masters: over all ranks, not a copy's

    def __post_init__(self) -> None:
        """Refuse what there is no sense in."""
        sharded = self.shards_params and self.shards_grads and self.shards_optimizer
        if self.shards_over_copies and not (self.replicates and sharded):
            raise UsageError(
                f"strategy {self.name}: only what copies share out is sharded over them "
                "(shards_over_copies without replicates, or with something whole)"
            )

    @property
    def keeps_whole_params(self) -> bool:
        """Whether the parameters stay whole on every rank between steps."""
        return not self.shards_params

    @property
    def has_owner_map(self) -> bool:
        """Whether it is free which rank steps which elements."""
        return self.shards_optimizer and not self.shards_params

    @property
    def renews_params(self) -> bool:
        """Whether after a step ranks need what others have updated."""
        return self.shards_optimizer and (self.keeps_whole_params or self.shards_over_copies)

    def shares(self, num_copies: int) -> int:
        """Into how many shares a rank's part is cut, one for each copy's masters."""
        return num_copies if self.shards_over_copies else 1


_TABLE = (
    #        name, known as, shards params, reshards, grads, optimizer, replicates, over copies
    Strategy("no_shard", "DDP", False, False, False, False, False),
    Strategy("shard_optimizer", "ZeRO-1", False, False, True, True, False),
    Strategy("shard_grad_op", "ZeRO-2", True, False, True, True, False),
    Strategy("full_shard", "ZeRO-3, FSDP", True, True, True, True, False),
    Strategy("hybrid_shard", "HSDP", True, True, True, True, True),
    Strategy("hybrid_shard_grad_op", "HSDP, ZeRO-2", True, False, True, True, True),
    Strategy("hybrid_shard_optimizer", "ZeRO++ hpZ", True, True, True, True, True, True),
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
    "hpz": "hybrid_shard_optimizer",
    "zero++": "hybrid_shard_optimizer",
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
    if like.keeps_whole_params:
        raise UsageError(
            f"strategy={like.name}: parameters are whole at all times, so reshard_after_forward "
            "has nothing to say"
        )
    found = _row_like(replace(like, reshard_after_forward=reshards))
    if found is None:
        raise UsageError(
            f"strategy={like.name}: parameters are freed after forward; there is none like it that "
            "keeps them (reshard_after_forward=false)"
        )
    return found


def _row_like(wanted: Strategy) -> Strategy | None:
    """The row that does what `wanted` does, whatever it is called."""
    for row in _TABLE:
        if replace(row, name=wanted.name, known_as=wanted.known_as) == wanted:
            return row
    return None


def sharded_over_copies(strategy: Strategy) -> Strategy | None:
    """The row like a hybrid one whose copies share out what the optimizer has, if there is one."""
    if not strategy.replicates or strategy.shards_over_copies:
        return None
    return _row_like(replace(strategy, shards_over_copies=True))


def effective_strategy(strategy: Strategy, copy_size: int, world_size: int) -> tuple[Strategy, int]:
    """What really runs where `copy_size` ranks share a copy, and how many share its buffers.

    One rank alone shares nothing. Where every rank has a copy of its own, its parameters are whole,
    and all ranks share what is sharded over copies, or nothing. Where there is one copy, nothing is
    replicated.
    """
    if world_size == 1:
        return STRATEGIES["no_shard"], 1
    if not strategy.replicates or 1 < copy_size < world_size:
        return strategy, copy_size
    alike = replace(strategy, replicates=False, shards_over_copies=False)
    if copy_size == 1:
        shares = strategy.shards_over_copies
        alike = replace(
            alike,
            shards_params=False,
            reshard_after_forward=False,
            shards_grads=shares,
            shards_optimizer=shares,
        )
    return _row_like(alike) or alike, world_size


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
