"""The engines, and the strategies that each of them supports."""

from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES, Strategy

OURS, FSDP2, DDP = "fsdpctl", "fsdp2", "ddp"
ENGINES = (OURS, FSDP2, DDP)


def has_strategy(engine: str, strategy: Strategy) -> bool:
    """Return whether an engine supports a strategy."""
    if engine == DDP:
        return not (strategy.shards_params or strategy.shards_grads or strategy.shards_optimizer)
    return engine != FSDP2 or (strategy.shards_params and not strategy.shards_over_copies)


def check_strategy(engine: str, strategy: Strategy) -> None:
    """Check that an engine supports a strategy.

    Raises:
        UsageError: If it does not.
    """
    if not has_strategy(engine, strategy):
        can = ", ".join(name for name, row in STRATEGIES.items() if has_strategy(engine, row))
        raise UsageError(f"engine={engine}: strategy={strategy.name} not supported; expected {can}")
