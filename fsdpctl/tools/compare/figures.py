"""From the metrics of a variant's runs to its figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

from fsdpctl.errors import FsdpctlError
from fsdpctl.io.documents import parse_json
from fsdpctl.run.files import METRICS
from fsdpctl.tools.compare.row import Round, Row

_WARM_UP = 0.25  # share of the steps that no figure is taken from
_PARTS = (
    "compute_seconds",
    "exposed_communication_seconds",
    "optimizer_seconds",
    "data_seconds",
)
_PEAKS = ("peak_allocated_bytes", "peak_tensor_bytes", "peak_reserved_bytes")


def round_of(run_dir: Path, kept: str | None) -> Round:
    """What a run in `run_dir` says of itself, which will be found as `kept`.

    Raises:
        FsdpctlError: there are too few steps in it.
        UsageError: its metrics are damaged.
    """
    file = run_dir / METRICS
    text = file.read_text(encoding="utf-8")
    lines = [parse_json(line, dict[str, Any], str(file)) for line in text.splitlines()]
    steps = [line for line in lines if "loss" in line]
    timed = steps[int(len(steps) * _WARM_UP) :]
    if len(timed) < 2:
        raise FsdpctlError(f"{file}: has too few steps to say how fast they were")
    low, middle, high = quantiles(
        (line["tokens_per_second"] for line in timed), n=4, method="inclusive"
    )
    step_seconds = median(line["seconds"] for line in timed)
    last, ending = steps[-1], lines[-1]
    on_device = last["peak_allocated_bytes"] is not None
    return Round(
        run_dir=kept,
        tokens_per_second=middle,
        tokens_per_second_quartiles=(low, high),
        step_seconds=step_seconds,
        mfu=_median([line["mfu"] for line in timed]),
        peak_allocated_bytes=ending.get("peak_engine_bytes"),
        peak_tensor_bytes=last["peak_allocated_bytes"],
        peak_reserved_bytes=last["peak_reserved_bytes"] if on_device else None,
        final_loss=last["loss"],
        **_shared_out(step_seconds, [(line["seconds"], line) for line in timed]),
    )


def summarised(rows: Sequence[Row]) -> list[Row]:
    """The figures of all variants, from their rounds.

    A round in which the machine was slower was slower for all. That is divided out of it: by the
    median, over the variants, of how fast each was in this round beside itself in all rounds.
    """
    drifts = drifts_between([[each.tokens_per_second for each in row.rounds] for row in rows])
    num_rows = sum(bool(row.rounds) for row in rows)
    return [_with_figures(row, drifts, num_rows) if row.rounds else row for row in rows]


def drifts_between(speeds: Sequence[Sequence[float]]) -> list[float]:
    """How fast the machine was in each round, beside all of them, by each variant's speeds."""
    known = [each for each in speeds if each]
    whole = min(map(len, known), default=0)  # rounds that all have run in
    most = max(map(len, known), default=0)
    if len(known) < 2 or not whole:
        return [1.0] * most
    return [
        median(each[at] / geometric_mean(each[:whole]) for each in known if at < len(each))
        for at in range(most)
    ]


def _with_figures(row: Row, drifts: Sequence[float], num_rows: int) -> Row:
    rounds = [replace(r, drift=drift) for r, drift in zip(row.rounds, drifts, strict=False)]
    speeds = [each.tokens_per_second / each.drift for each in rounds]
    middle, spread = median(speeds), rounds[0].tokens_per_second_quartiles
    if len(rounds) > 1:
        # Of few variants each has a part in what was divided out, which took of its own spread.
        widening = math.sqrt(num_rows / (num_rows - 1)) if num_rows > 1 else 1.0
        low, high = (middle * (e / middle) ** widening for e in (min(speeds), max(speeds)))
        spread = low, high
    step_seconds = median(each.step_seconds * each.drift for each in rounds)
    found: dict[str, Any] = {"step_seconds": step_seconds}
    found |= _shared_out(step_seconds, [(each.step_seconds, asdict(each)) for each in rounds])
    for name in _PEAKS:
        known = [value for each in rounds if (value := getattr(each, name)) is not None]
        found[name] = max(known, default=None)
    found["mfu"] = _median([None if r.mfu is None else r.mfu / r.drift for r in rounds])
    return replace(
        row,
        rounds=tuple(rounds),
        tokens_per_second=middle,
        tokens_per_second_spread=spread,
        final_loss=rounds[0].final_loss,
        **found,
    )


def _shared_out(seconds: float, times: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """`seconds` divided as all `times` together were: medians of parts would not add up.

    None of a part that is not known: it lies within another.
    """
    total = sum(whole for whole, _ in times)
    spent = {name: [parts[name] for _, parts in times] for name in _PARTS}
    return {
        name: None if None in parts else seconds * sum(parts) / total
        for name, parts in spent.items()
    }


def _median(values: Sequence[float | None]) -> float | None:
    """None where not all are known."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None
