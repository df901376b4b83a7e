"""`fsdpctl compare-runs`: losses, settings, and the environments of the newest starts."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from msgspec import UNSET

from fsdpctl.commands.console import AsJson, say, show_json, show_table
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.run_files import METRICS
from fsdpctl.run.environment import RECORD, read_settings, read_starts
from fsdpctl.run.metrics import read_metrics

_FIGURES = ("loss", "val_loss", "grad_norm")
_Values = dict[int, float | None]  # by step; None: not finite
_NOT_COMPARED = ("train.run_dir", "started", "command", RECORD)


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """The values of both runs at a step."""

    step: int
    a: float | None  # None: not finite
    b: float | None

    def __str__(self) -> str:
        rounded, exact = (
            [format(x or 0.0, form) for x in (self.a, self.b)] for form in (".9g", "")
        )
        shown = zip((self.a, self.b), exact if len({*rounded}) == 1 else rounded, strict=True)
        return " and ".join("not finite" if x is None else text for x, text in shown)


@dataclass(frozen=True, slots=True)
class Series:
    """The comparison of one metric."""

    name: str
    compared: int  # steps of both runs
    only_in_one: int  # steps of one run
    first: ComparedStep | None  # the first step where they differ


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
    configuration: list[Setting]
    environment: list[Setting]

    @property
    def differences(self) -> list[str]:
        """The differences of losses, a clause each; settings do not count."""
        return list(_differences(self.series["loss"], self.series["val_loss"]))


def compare_runs(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run directory.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run directory to compare with.")],
    assert_equal: Annotated[
        bool,
        typer.Option(
            "--assert-equal", help="Exit with code 1 unless losses and validation losses are equal."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show how two existing runs differ.

    Compares losses, settings, and the environments of the newest starts.
    """
    found = compared_runs(run_a, run_b)
    if as_json:
        about = asdict(found)
        about |= {**about.pop("series"), "a": str(run_a), "b": str(run_b)}
        differences = found.differences
        show_json({**about, "equal": not differences, "differences": differences})
    else:
        _show(found)
    if assert_equal and found.differences:
        raise FsdpctlError(f"{run_a} and {run_b} differ: {'; '.join(found.differences)}")


def _differences(loss: Series, validation: Series) -> Iterator[str]:
    if not loss.compared:
        yield "no common step"
    for each in (loss, validation):
        if each.first is not None:
            yield f"{each.name} from step {each.first.step} on ({each.first})"
    if loss.compared and loss.only_in_one:
        yield f"{loss.only_in_one} steps in one run only"


def _show(found: TwoRuns) -> None:
    say(f"A       {found.a}", f"B       {found.b}", "")
    rows = [
        [each.name, f"{each.compared:,}", f"step {each.first.step}: {each.first}"]
        if each.first is not None
        else [each.name, f"{each.compared:,}", "equal" if each.compared else "-"]
        for each in found.series.values()
    ]
    show_table(("metric", "steps", "first difference"), rows, right=("steps",))
    say("")
    for name, keys in (("configuration", found.configuration), ("environment", found.environment)):
        if keys:
            rows = [[x.key, x.a or "not set", x.b or "not set"] for x in keys]
            show_table((name, "A", "B"), rows)
        else:
            say(f"{name}s are equal")
        say("")
    differ = "; ".join(found.differences)
    say(f"differ  {differ}" if differ else "equal   everything compared")


def compared_runs(a: Path, b: Path) -> TwoRuns:
    """Compare the runs in two directories; UsageError if one is not a run or corrupted."""
    settings = _differing(*map(read_settings, (a, b)))
    of_a, of_b = map(_figures, (a, b))
    series = {name: _compared(name, of_a[name], of_b[name]) for name in _FIGURES}
    return TwoRuns(a, b, series, settings, _differing(*map(_environment, (a, b))))


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[Setting]:
    return [
        Setting(key, a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if key not in _NOT_COMPARED and a.get(key) != b.get(key)
    ]


def _environment(run_dir: Path) -> dict[str, str]:
    (*_, newest) = [{}, *read_starts(run_dir)]
    found = {key: x for key, x in newest.items() if key not in _NOT_COMPARED}
    for key, x in newest.items():
        if key in found and isinstance(x, dict):  # each variable by itself: lines stay short
            found |= {f"{key}.{name}": value for name, value in found.pop(key).items()}
    return {key: x if isinstance(x, str) else json.dumps(x) for key, x in found.items()}


def _figures(run_dir: Path) -> dict[str, _Values]:
    """Read the values of every step from metrics.jsonl; of a repeated step the last ones."""
    found: dict[str, _Values] = {name: {} for name in _FIGURES}
    for line in read_metrics(run_dir / METRICS):
        for name in _FIGURES:
            value = getattr(line, name)
            if value is not UNSET:
                found[name][line.step] = value
    return found


def _compared(name: str, a: _Values, b: _Values) -> Series:
    both = sorted(a.keys() & b.keys())
    points = (ComparedStep(step, a[step], b[step]) for step in both)
    first = next((each for each in points if each.a != each.b), None)
    return Series(name, len(both), len(a.keys() ^ b.keys()), first)
