"""Summary of a variant's runs from their metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

from fsdpctl.errors import FsdpctlError
from fsdpctl.run.files import METRICS
from fsdpctl.run.metrics import read_metrics
from fsdpctl.tools.compare.row import Round, Row

_WARM_UP = 0.25  # share of the steps that are ignored
_PARTS = (
    "compute_seconds",
    "exposed_communication_seconds",
    "optimizer_seconds",
    "data_seconds",
)
_PEAKS = ("peak_engine_bytes", "peak_tensor_bytes", "peak_reserved_bytes")


def round_of(run_dir: Path, kept: str | None) -> Round:
    """Summarize the metrics of the run in `run_dir`, which is kept as `kept`.

    Raises:
        FsdpctlError: If it has too few steps.
        UsageError: If its metrics are corrupted.
    """
    file = run_dir / METRICS
    lines = list(read_metrics(file))
    steps = [line for line in lines if line.is_step]
    timed = steps[int(len(steps) * _WARM_UP) :]
    if len(timed) < 2:
        raise FsdpctlError(f"{file}: too few steps to measure their speed")
    low, middle, high = quantiles(
        (line.tokens_per_second or 0.0 for line in timed), n=4, method="inclusive"
    )
    step_seconds = median(line.seconds or 0.0 for line in timed)
    last, ending = steps[-1], lines[-1]
    on_device = last.peak_allocated_bytes is not None
    return Round(
        run_dir=kept,
        tokens_per_second=middle,
        tokens_per_second_quartiles=(low, high),
        step_seconds=step_seconds,
        mfu=_median([line.mfu for line in timed]),
        peak_engine_bytes=ending.peak_engine_bytes,
        peak_tensor_bytes=last.peak_allocated_bytes,
        peak_reserved_bytes=last.peak_reserved_bytes if on_device else None,
        final_loss=last.loss if isinstance(last.loss, float) else None,
        **_parts_of(step_seconds, [(line.seconds or 0.0, asdict(line)) for line in timed]),
    )


def summarized(rows: Sequence[Row]) -> list[Row]:
    """Summarize the rounds of all variants.

    If the machine is slower in a round, all variants are. This drift is divided out: it is the
    median over variants of a variant's speed in the round relative to its speed in all rounds.
    """
    drifts = drifts_between([[each.tokens_per_second for each in row.rounds] for row in rows])
    num_rows = sum(bool(row.rounds) for row in rows)
    return [_summary(row, drifts, num_rows) if row.rounds else row for row in rows]


def drifts_between(speeds: Sequence[Sequence[float]]) -> list[float]:
    """Return the machine's relative speed in each round, from each variant's speeds."""
    known = [each for each in speeds if each]
    common = min(map(len, known), default=0)  # rounds that all variants have run in
    most = max(map(len, known), default=0)
    if len(known) < 2 or not common:
        return [1.0] * most
    return [
        median(each[at] / geometric_mean(each[:common]) for each in known if at < len(each))
        for at in range(most)
    ]


def _summary(row: Row, drifts: Sequence[float], num_rows: int) -> Row:
    rounds = [replace(r, drift=drift) for r, drift in zip(row.rounds, drifts, strict=False)]
    speeds = [each.tokens_per_second / each.drift for each in rounds]
    middle, spread = median(speeds), rounds[0].tokens_per_second_quartiles
    if len(rounds) > 1:
        # With few variants, each contributes to the drift, which reduces its own spread.
        widening = math.sqrt(num_rows / (num_rows - 1)) if num_rows > 1 else 1.0
        low, high = (middle * (e / middle) ** widening for e in (min(speeds), max(speeds)))
        spread = low, high
    step_seconds = median(each.step_seconds * each.drift for each in rounds)
    found = _parts_of(step_seconds, [(each.step_seconds, asdict(each)) for each in rounds])
    for name in _PEAKS:
        known = [value for each in rounds if (value := getattr(each, name)) is not None]
        found[name] = max(known, default=None)
    return replace(
        row,
        rounds=tuple(rounds),
        tokens_per_second=middle,
        tokens_per_second_spread=spread,
        step_seconds=step_seconds,
        mfu=_median([None if r.mfu is None else r.mfu / r.drift for r in rounds]),
        final_loss=rounds[0].final_loss,
        **found,
    )


def _parts_of(seconds: float, times: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Divide `seconds` in the ratio of the sums of parts: medians of parts would not add up.

    A part that another one includes is unknown: None.
    """
    total = sum(step for step, _ in times)
    spent = {name: [parts[name] for _, parts in times] for name in _PARTS}
    return {
        name: None if None in parts else seconds * sum(parts) / total
        for name, parts in spent.items()
    }


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, or None unless all values are known."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None
