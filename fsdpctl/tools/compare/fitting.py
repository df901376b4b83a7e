"""What a variant holds by the estimate, and what would fit."""

from collections.abc import Mapping
from dataclasses import replace

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.fit import LargestModel, largest_model
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.run.progress import format_bytes
from fsdpctl.tools.compare.row import TOO_LARGE, Row

_OWNED = ("parameters", "gradients", "optimizer_states", "gathered_units", "reduce_buffers")
_REST = "activations and the rest"


def with_memory(
    row: Row, estimate: RunEstimate, engine_parts: Mapping[str, int] | None = None
) -> Row:
    """`row` with what is estimated; `engine_parts`: at the engine's own peak, where known."""
    parts = engine_parts or {name: estimate.step.breakdown[name] for name in _OWNED}
    return replace(
        row,
        estimated_peak_tensor_bytes=estimate.allocated,
        estimated_peak_reserved_bytes=estimate.peak_reserved,
        estimated_breakdown={**parts, _REST: estimate.allocated - sum(parts.values())},
        memory_bytes=estimate.available,
    )


def lacks_room(estimate: RunEstimate) -> str | None:
    """The status of a variant that does not fit."""
    if estimate.verdict != "too_large":
        return None
    return (
        f"{TOO_LARGE}a rank needs {format_bytes(estimate.peak_reserved)}, of "
        f"{format_bytes(max(0, estimate.available))} that it may use"
    )


class LargestModels:
    """The largest model that fits, found once for each engine and strategy."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._found: set[tuple[str, str]] = set()

    def under(self, config: Config) -> LargestModel | None:
        """With the settings of the first `config` of its kind; None for those that follow."""
        key = config.engine.name, config.strategy.name
        if key in self._found:
            return None
        self._found.add(key)
        try:
            return largest_model(self._estimator, config)
        except UsageError:
            return None  # it is not estimated
