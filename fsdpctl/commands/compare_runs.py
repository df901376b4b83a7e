"""The comparison of two runs: losses, settings, and the environments of their newest starts."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import UNSET

from fsdpctl.config.recipe import read_recipe
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import METRICS, RUN_CONFIG, check_own
from fsdpctl.run.environment import read_starts
from fsdpctl.run.metrics import read_metrics

FIGURES = ("loss", "val_loss", "grad_norm")
Values = dict[int, float | None]  # by step; None: not finite
_NOT_COMPARED = ("train.run_dir", "started", "command")


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """The values of both runs at a step."""

    step: int
    a: float | None  # None: not finite
    b: float | None

    def __str__(self) -> str:
        return " and ".join("not finite" if x is None else f"{x:.9g}" for x in (self.a, self.b))

    @property
    def difference(self) -> float:
        """The absolute difference; infinite if only one value is finite."""
        if self.a is None or self.b is None:
            return 0.0 if self.a is self.b else math.inf
        return abs(self.a - self.b)


@dataclass(frozen=True, slots=True)
class Series:
    """The comparison of one metric."""

    name: str
    compared: int  # steps of both runs
    only_a: int  # steps of one run
    only_b: int
    first: ComparedStep | None  # the first step where they differ
    largest: ComparedStep | None  # the step with the largest difference
    num_different: int

    def to_dict(self) -> dict[str, Any]:
        """Return the object for `--json`."""
        found = asdict(self)
        if self.largest is not None:
            apart = self.largest.difference
            found["largest"]["difference"] = apart if math.isfinite(apart) else None
        return found


@dataclass(frozen=True, slots=True)
class Setting:
    """A key whose values differ; None: not set."""

    key: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """The differences between two runs."""

    a: Path
    b: Path
    series: dict[str, Series]  # by name
    configuration: tuple[Setting, ...]
    environment: tuple[Setting, ...]

    @property
    def differences(self) -> list[str]:
        """The differences of losses, a clause each; settings do not count."""
        return list(_of_losses(self.series))

    def to_dict(self) -> dict[str, Any]:
        """Return the object for `compare-runs --json`."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            **{name: each.to_dict() for name, each in self.series.items()},
            "configuration": [asdict(each) for each in self.configuration],
            "environment": [asdict(each) for each in self.environment],
            "equal": not self.differences,
            "differences": self.differences,
        }


def _of_losses(series: dict[str, Series]) -> Iterator[str]:
    loss, validation = series["loss"], series["val_loss"]
    if not loss.compared:
        yield "no common step"
    for each in (loss, validation):
        if each.first is not None:
            yield f"{each.name} from step {each.first.step} on ({each.first})"
    if loss.compared and loss.only_a + loss.only_b:
        yield f"{loss.only_a + loss.only_b} steps in one run only"


def compare_runs(a: Path, b: Path) -> TwoRuns:
    """Compare the runs in two directories; UsageError if one is not a run or corrupted."""
    settings = _differing(*map(_settings, (a, b)))
    figures = [read_figures(each) for each in (a, b)]
    return TwoRuns(
        a,
        b,
        {name: compared(name, figures[0][name], figures[1][name]) for name in FIGURES},
        settings,
        _differing(*map(_environment, (a, b))),
    )


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Setting, ...]:
    return tuple(
        Setting(key, a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if key not in _NOT_COMPARED and a.get(key) != b.get(key)
    )


def _settings(run_dir: Path) -> dict[str, str]:
    check_own(run_dir)
    if not (run_dir / RUN_CONFIG).is_file():
        raise UsageError(f"{run_dir}: not a run of fsdpctl ({RUN_CONFIG} not found)")
    return dict(read_recipe(run_dir / RUN_CONFIG))


def _environment(run_dir: Path) -> dict[str, str]:
    (*_, newest) = [{}, *read_starts(run_dir)]
    return {key: x if isinstance(x, str) else json.dumps(x) for key, x in newest.items()}


def read_figures(run_dir: Path) -> dict[str, Values]:
    """Read the values of every step from metrics.jsonl; of a repeated step the last ones."""
    found: dict[str, Values] = {name: {} for name in FIGURES}
    for line in read_metrics(run_dir / METRICS):
        for name in FIGURES:
            value = getattr(line, name)
            if value is not UNSET:
                found[name][line.step] = value
    return found


def compared(name: str, a: Values, b: Values) -> Series:
    """Compare the metric `name` of two runs."""
    both = sorted(a.keys() & b.keys())
    points = [ComparedStep(step, a[step], b[step]) for step in both]
    apart = [point for point in points if point.difference > 0]
    return Series(
        name,
        compared=len(both),
        only_a=len(a.keys() - b.keys()),
        only_b=len(b.keys() - a.keys()),
        first=apart[0] if apart else None,
        largest=max(apart, key=lambda point: point.difference, default=None),
        num_different=len(apart),
    )
