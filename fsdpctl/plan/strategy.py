"""One row per sharding strategy: what each rank stores on its device and host, and for how long."""

from dataclasses import astuple, dataclass, replace
from enum import Flag, auto
from functools import reduce
from operator import or_

from fsdpctl.errors import UsageError, did_you_mean


@dataclass(frozen=True, slots=True)
class Strategy:
    """The model states that a strategy shards, and the ranks over which it shards them."""

    name: str
    known_as: str
    shards_params: bool  # between steps
    reshard_after_forward: bool  # units are freed after forward and gathered again in backward
    shards_grads: bool  # reduced gradients; a rank steps only its shard
    shards_optimizer: bool  # optimizer states and master weights
    replicates: bool  # each group of `dp_shard_size` ranks has a replica
    # Whether gradients, optimizer states and master weights are also sharded over replicas.
    shards_over_replicas: bool = False

    def __post_init__(self) -> None:
        sharded = self.shards_params and self.shards_grads and self.shards_optimizer
        if self.shards_over_replicas and not (self.replicates and sharded):
            required = "replicates, and sharded parameters, gradients and optimizer states"
            raise UsageError(f"strategy {self.name}: shards_over_replicas requires {required}")

    @property
    def is_fully_sharded(self) -> bool:
        """Whether each rank stores the least that any strategy allows."""
        return self.reshard_after_forward and not self.replicates

    @property
    def has_owner_map(self) -> bool:
        """Whether an owner map can assign optimizer states to ranks."""
        return self.shards_optimizer and not self.shards_params

    @property
    def syncs_params(self) -> bool:
        """Whether a rank stores parameters that other ranks update in a step."""
        return self.shards_optimizer and (not self.shards_params or self.shards_over_replicas)

    @property
    def can_offload_params(self) -> bool:
        """Whether a rank's shard of the parameters can be in host memory."""
        return self.shards_params and not self.shards_over_replicas

    def shares_per_shard(self, num_replicas: int) -> int:
        """Return the number of replicas that share the master weights of a shard."""
        return num_replicas if self.shards_over_replicas else 1


_TABLE = (
    #        name, known as, shards params, reshards, grads, optimizer, replicates, over replicas
    Strategy("no_shard", "DDP", False, False, False, False, False),
    Strategy("shard_optimizer", "ZeRO-1", False, False, True, True, False),
    Strategy("shard_grad_op", "ZeRO-2", True, False, True, True, False),
    Strategy("full_shard", "ZeRO-3, FSDP", True, True, True, True, False),
    Strategy("hybrid_shard", "HSDP", True, True, True, True, True),
    Strategy("hybrid_shard_grad_op", "HSDP, ZeRO-2", True, False, True, True, True),
    Strategy("hybrid_shard_optimizer", "ZeRO++ hpZ", True, True, True, True, True, True),
)

STRATEGIES: dict[str, Strategy] = {row.name: row for row in _TABLE}


# Names of other tools -> names of fsdpctl.
STRATEGY_ALIASES = {
    "ddp": "no_shard", "zero1": "shard_optimizer", "zero2": "shard_grad_op", "zero3": "full_shard",
    "fsdp": "full_shard", "hsdp": "hybrid_shard", "hpz": "hybrid_shard_optimizer",
    "zero++": "hybrid_shard_optimizer",
}  # fmt: skip


def get_strategy(name: str) -> Strategy:
    name = STRATEGY_ALIASES.get(name.lower(), name)
    if name not in STRATEGIES:
        expected = ", ".join(STRATEGIES) + did_you_mean(name, STRATEGIES)
        raise UsageError(f"strategy={name}: expected one of {expected}")
    return STRATEGIES[name]


def _row_like(strategy: Strategy) -> Strategy | None:
    """Return the row that differs from `strategy` at most in its names."""
    return next((row for row in _TABLE if astuple(row)[2:] == astuple(strategy)[2:]), None)


def sharded_over_replicas(strategy: Strategy) -> Strategy | None:
    """Return the variant of a hybrid `strategy` that shards states over replicas, or None."""
    if not strategy.replicates or strategy.shards_over_replicas:
        return None
    return _row_like(replace(strategy, shards_over_replicas=True))


def effective_strategy(
    strategy: Strategy,
    ranks_per_replica: int,
    world_size: int,
    *,
    shares_memory: bool = False,
    offloads_params: bool = False,
) -> tuple[Strategy, int]:
    """Return the strategy that is equivalent on these ranks, and its number of ranks per replica.

    A single rank runs no_shard. If ranks share memory, the parameters are in it once, unsharded,
    and each rank steps its shard (shard_optimizer). If each rank has a replica of its own, the
    parameters are unsharded (shard_optimizer if replicas share the optimizer states, else
    no_shard). With a single replica, nothing is replicated. With parameters in host memory, a
    strategy that gathers them is kept, even for a single rank.
    """
    if world_size == 1 and not offloads_params:
        return STRATEGIES["no_shard"], 1
    if shares_memory:
        return STRATEGIES["shard_optimizer"], world_size
    has_replicas = ranks_per_replica < world_size and (ranks_per_replica > 1 or offloads_params)
    if not strategy.replicates or has_replicas:
        return strategy, ranks_per_replica
    if ranks_per_replica < world_size:
        name = "shard_optimizer" if strategy.shards_over_replicas else "no_shard"
        return STRATEGIES[name], world_size
    unreplicated = replace(strategy, replicates=False, shards_over_replicas=False)
    # Without a row, the strategy is a user's and keeps its name.
    return _row_like(unreplicated) or unreplicated, world_size


def ranks_per_replica(strategy: Strategy, world_size: int, dp_shard_size: int | None) -> int:
    if not strategy.replicates:
        if dp_shard_size is not None:
            problem = f"only valid with hybrid strategies, not with {strategy.name}"
            raise UsageError(f"strategy.dp_shard_size={dp_shard_size}: {problem}")
        return world_size
    size = dp_shard_size or world_size
    if world_size % size:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        problem = f"must divide the {world_size} ranks ({divisors})"
        raise UsageError(f"strategy.dp_shard_size={size}: {problem}")
    return size


FSDPCTL, FSDP2, DDP = "fsdpctl", "fsdp2", "ddp"
ENGINES = (FSDPCTL, FSDP2, DDP)


def engine_strategies(engine: str) -> list[str]:
    if engine == DDP:
        return ["no_shard"]
    if engine != FSDP2:
        return [*STRATEGIES]
    return [n for n, x in STRATEGIES.items() if x.shards_params and not x.shards_over_replicas]


def check_strategy(engine: str, strategy: Strategy) -> None:
    supported = engine_strategies(engine)
    if strategy.name not in supported:
        problem = f"strategy={strategy.name} not supported; expected {', '.join(supported)}"
        raise UsageError(f"engine={engine}: {problem}")


class Offload(Flag):
    """A set of model states that are in host memory."""

    NONE = 0
    STATES = auto()  # master weights and moments, which are stepped there
    GRADIENTS = auto()  # reduced gradients
    PARAMS = auto()  # frozen parameters between steps; with STATES, trained parameters too
    ALL = STATES | GRADIENTS | PARAMS

    @classmethod
    def parse(cls, text: str) -> "Offload":
        """Return the states named by a comma-separated list, with or without brackets."""
        names = [each.strip().upper() for each in text.strip("[] ").split(",")]
        if not all(each in cls.__members__ for each in names):
            problem = "expected none, all, or a list of states, gradients, params"
            raise UsageError(f"strategy.offload={text}: {problem}")
        offload = reduce(or_, (cls[each] for each in names))
        if cls.GRADIENTS in offload and cls.STATES not in offload:
            raise UsageError(f"strategy.offload={text}: gradients require states; add states")
        return offload

    def __str__(self) -> str:
        return str(self.name).lower().replace("|", ",")

    def conflict(self, requested: Strategy, effective: Strategy, num_ranks: int) -> str:
        """Return why a strategy does not support this set; empty if it does.

        `effective` is the strategy that `requested` is equivalent to on these ranks. Offloaded
        parameters need shards, and offloaded states a sharded optimizer.
        """
        if self.PARAMS in self and not requested.can_offload_params:
            supported = ", ".join(n for n, row in STRATEGIES.items() if row.can_offload_params)
            return f"params: not supported with strategy={requested.name}; expected {supported}"
        if self.STATES in self and num_ranks > 1 and not effective.shards_optimizer:
            shard_size = " strategy.dp_shard_size=1" if requested.replicates else ""
            return (
                f"not supported with strategy={requested.name}{shard_size} on {num_ranks} ranks, "
                "which would all step all parameters; expected a strategy that shards optimizer "
                "states, such as shard_grad_op"
            )
        return ""

    def check_frozen_params(self, *, trains_all: bool) -> None:
        """Refuse `params` alone if no parameter is frozen."""
        if self is Offload.PARAMS and trains_all:
            problem = "only valid with frozen parameters (model.lora)"
            expected = "expected states,params or all"
            raise UsageError(f"strategy.offload=params: {problem}; {expected}")
