"""Memory of a variant by its estimate, and the largest model that would fit."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.fit import LargestModel, largest_model
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.run.progress import format_bytes
from fsdpctl.tools.compare.row import OK, TOO_LARGE, Row

_OWNED = ("parameters", "gradients", "optimizer_states", "gathered_units", "reduce_buffers")
_REST = "activations and the rest"


def with_memory(
    row: Row, estimate: RunEstimate, engine_parts: Mapping[str, int] | None = None
) -> Row:
    """Return `row` with its estimated memory, and the status that follows from it.

    `engine_parts`: what the engine owns at its own peak, if known.
    """
    parts = engine_parts or {name: estimate.step.breakdown[name] for name in _OWNED}
    status = OK
    if estimate.verdict == "too_large":
        needed = format_bytes(estimate.peak_reserved)
        available = format_bytes(max(0, estimate.available))
        status = f"{TOO_LARGE}{needed} per rank needed, {available} available"
    return replace(
        row,
        estimated_peak_tensor_bytes=estimate.allocated,
        estimated_peak_reserved_bytes=estimate.peak_reserved,
        estimated_breakdown={**parts, _REST: estimate.allocated - sum(parts.values())},
        memory_bytes=estimate.available,
        status=status,
    )


def largest_models(
    estimator: Estimator, configs: Iterable[Config | None]
) -> Iterator[LargestModel | None]:
    """Yield the largest model that fits, for the first configuration of each engine and strategy.

    For others, and where the estimate does not support it, yield None.
    """
    seen = set()
    for config in configs:
        key = None if config is None else (config.engine.name, config.strategy.name)
        found = None
        if config is not None and key not in seen:
            seen.add(key)
            with suppress(UsageError):
                found = largest_model(estimator, config)
        yield found
