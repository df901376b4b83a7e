"""Runs each variant for some steps, one after another, and measures it."""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from fsdpctl.compare import OK, REFUSED
from fsdpctl.compare.vary import Variant
from fsdpctl.errors import InterruptError, StoppedError, UsageError
from fsdpctl.estimate.kept import engine_bytes
from fsdpctl.launch.local import launch_workers
from fsdpctl.reading.documents import parse_json
from fsdpctl.resolve.machine import world_size
from fsdpctl.resolve.run import ResolvedRun, resolve
from fsdpctl.train.assets import collect_assets
from fsdpctl.train.run_dir import LOGS, METRICS, plan_start, prepare_run_dir
from fsdpctl.train.run_lock import lock_run_dir
from fsdpctl.train.worker import MEASURE, MODULE

_WARM_UP = 0.25  # share of the steps that no figure is taken from


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one variant; None where it did not get so far."""

    varied: dict[str, str]
    strategy: str
    engine: str = "fsdpctl"
    world_size: int | None = None
    tokens_per_second: float | None = None
    tokens_per_second_spread: tuple[float, float] | None = None  # its quartiles
    step_seconds: float | None = None
    exposed_communication_seconds: float | None = None  # of a step, on rank 0
    peak_allocated_bytes: int | None = None  # of what the estimate counts, on the fullest rank
    estimated_peak_allocated_bytes: int | None = None
    final_loss: float | None = None
    status: str = OK

    def to_dict(self) -> dict[str, Any]:
        """What `compare --json` prints of it."""
        return asdict(self)


def as_fast_as_the_fastest(rows: Sequence[Row]) -> list[Row]:
    """The fastest, and those whose speed cannot be told from its: their quartiles overlap."""
    timed = [(row, row.tokens_per_second_spread) for row in rows if row.tokens_per_second]
    if not timed:
        return []
    fastest = max((row for row, _ in timed), key=lambda row: row.tokens_per_second or 0.0)
    assert fastest.tokens_per_second_spread is not None
    least = fastest.tokens_per_second_spread[0]
    return [
        fastest,
        *(r for r, spread in timed if r is not fastest and spread and spread[1] >= least),
    ]


def measure_all(
    variants: Sequence[Variant], folder: Path, say: Callable[[str], None]
) -> Iterator[Row]:
    """A row for each variant, in order; one that fails does not keep the others from running.

    Args:
        variants: what to run.
        folder: an existing directory for the runs' directories.
        say: is told what is being run.

    Raises:
        StoppedError, InterruptError: somebody asked to stop.
    """
    for number, variant in enumerate(variants, start=1):
        say(f"{number}/{len(variants)}  {variant.label or variant.composed.config.strategy.name}")
        yield _measure(variant, folder / f"{number:02d}")


def _measure(variant: Variant, run_dir: Path) -> Row:
    config = variant.composed.config
    config = replace(config, train=replace(config.train, run_dir=str(run_dir)))
    row = Row(variant.varied, config.strategy.name, config.engine.name)
    try:
        run = resolve(replace(variant.composed, config=config))
    except UsageError as error:
        return replace(row, status=f"{REFUSED}{error}")
    if run.notes:  # something else would be measured than was asked for
        return replace(row, status=f"{REFUSED}{run.notes[0]}")
    row = replace(
        row,
        world_size=world_size(run.config),
        estimated_peak_allocated_bytes=engine_bytes(run),
    )
    failure = _run(run, variant, run_dir)
    return replace(row, status=f"failed: {failure}") if failure else _with_figures(row, run_dir)


def _run(run: ResolvedRun, variant: Variant, run_dir: Path) -> str | None:
    """Returns why it failed, if it did."""
    lock = lock_run_dir(run_dir, lambda: None)
    start = plan_start(run.config, "auto")
    prepare_run_dir(start, [variant.label], collect_assets(run.config, run.data))
    words = [str(run_dir), MEASURE]
    outcome = launch_workers(MODULE, words, run.config.launch, logs=run_dir / LOGS)
    lock.release()
    if outcome.stop_signal == signal.SIGINT:
        raise InterruptError("interrupted before all variants had run")
    if outcome.stop_signal is not None:
        raise StoppedError("stopped before all variants had run")
    return None if outcome.cause is None else outcome.cause.cause


def _with_figures(row: Row, run_dir: Path) -> Row:
    file = run_dir / METRICS
    lines = [
        parse_json(line, dict[str, Any], str(file))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    steps = [line for line in lines if "loss" in line]
    timed = steps[int(len(steps) * _WARM_UP) :]
    speeds = [line["tokens_per_second"] for line in timed]
    waits = [wait for line in timed if (wait := line["exposed_communication_seconds"]) is not None]
    low, middle, high = quantiles(speeds, n=4, method="inclusive")
    return replace(
        row,
        tokens_per_second=middle,
        tokens_per_second_spread=(low, high),
        step_seconds=median(line["seconds"] for line in timed),
        exposed_communication_seconds=median(waits) if waits else None,
        peak_allocated_bytes=lines[-1]["peak_engine_bytes"],
        final_loss=steps[-1]["loss"],
    )
