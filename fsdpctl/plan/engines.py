"""Which engines there are, and which strategies each of them has."""

from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES, Strategy

OURS, FSDP2, DDP = "fsdpctl", "fsdp2", "ddp"
ENGINES = (OURS, FSDP2, DDP)


def has_strategy(engine: str, strategy: Strategy) -> bool:
    """Whether an engine can do what a strategy says."""
    if engine == DDP:
        return not (strategy.shards_params or strategy.shards_grads or strategy.shards_optimizer)
    return engine != FSDP2 or (strategy.shards_params and not strategy.shards_over_copies)


def check_strategy(engine: str, strategy: Strategy) -> None:
    """See that an engine can do what a strategy says.

    Raises:
        UsageError: it cannot.
    """
    if not has_strategy(engine, strategy):
        can = ", ".join(name for name, row in STRATEGIES.items() if has_strategy(engine, row))
        raise UsageError(f"engine={engine}: not with strategy={strategy.name}; it can {can}")
