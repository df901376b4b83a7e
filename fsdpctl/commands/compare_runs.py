"""`fsdpctl compare-runs`: losses, settings, and the environments of the newest starts."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import UNSET

from fsdpctl.commands.printing import AsJson, say, show_json, show_table
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.run_files import METRICS
from fsdpctl.run.environment import EVENTS_KEY, read_settings, read_starts
from fsdpctl.run.metrics import read_metrics

_COMPARED_METRICS = ("loss", "val_loss", "grad_norm")
_DECIDING = _COMPARED_METRICS[:2]  # a difference makes the runs different
_NOT_COMPARED = ("train.run_dir", "started", "command", EVENTS_KEY)


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
    comparison = compare_run_dirs(run_a, run_b)
    differ = "; ".join(comparison["differences"])
    if as_json:
        show_json(comparison)
    else:
        say(f"A       {run_a}", f"B       {run_b}", "")
        series = {name: comparison[name] for name in _COMPARED_METRICS}
        rows = [[name, f"{x['compared']:,}", _first_text(x)] for name, x in series.items()]
        show_table(("metric", "steps", "first difference"), rows, right=("steps",))
        for name in ("configuration", "environment"):
            rows = [[x["key"], x["a"] or "not set", x["b"] or "not set"] for x in comparison[name]]
            say("", *([] if rows else [f"{name}s are equal"]))
            if rows:
                show_table((name, "A", "B"), rows)
        say("", f"differ  {differ}" if differ else "equal   everything compared")
    if assert_equal and differ:
        raise FsdpctlError(f"{run_a} and {run_b} differ: {differ}")


def compare_run_dirs(a: Path, b: Path) -> dict[str, Any]:
    """Compare the runs in two directories; UsageError if one is not a run or corrupted."""
    configuration = _differing_settings(*map(read_settings, (a, b)))
    values_a, values_b = map(_metrics_by_step, (a, b))
    series = {x: _compare_series(x, values_a[x], values_b[x]) for x in _COMPARED_METRICS}
    differences = [*_loss_differences(series)]
    return {
        "a": str(a), "b": str(b), **series, "configuration": configuration,
        "environment": _differing_settings(*map(_environment, (a, b))),
        "equal": not differences, "differences": differences,
    }  # fmt: skip


def _loss_differences(series: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each difference of the losses; settings do not count."""
    if not series["loss"]["compared"]:
        yield "no common step"
    for name in _DECIDING:
        if (first := series[name]["first"]) is not None:
            yield f"{name} from step {first['step']} on ({_values_text(first)})"
    if series["loss"]["compared"] and (more := series["loss"]["only_in_one"]):
        yield f"{more} steps in one run only"


def _first_text(series: Mapping[str, Any]) -> str:
    if (first := series["first"]) is None:
        return "equal" if series["compared"] else "-"
    return f"step {first['step']}: {_values_text(first)}"


def _values_text(first: Mapping[str, Any]) -> str:
    """Return both values, with the digits in which they differ."""
    values = [first["a"], first["b"]]
    rounded, exact = ([format(x or 0.0, form) for x in values] for form in (".9g", ""))
    texts = zip(values, exact if len({*rounded}) == 1 else rounded, strict=True)
    return " and ".join("not finite" if x is None else text for x, text in texts)


def _differing_settings(a: Mapping[str, str], b: Mapping[str, str]) -> list[dict[str, str | None]]:
    return [
        {"key": key, "a": a.get(key), "b": b.get(key)}
        for key in sorted(a.keys() | b.keys())
        if key not in _NOT_COMPARED and a.get(key) != b.get(key)
    ]


def _environment(run_dir: Path) -> dict[str, str]:
    newest = (read_starts(run_dir) or [{}])[-1]
    if isinstance(variables := newest.get("variables"), dict):  # each has a line
        newest |= {f"variables.{key}": x for key, x in variables.items()} | {"variables": None}
    return {key: x if isinstance(x, str) else json.dumps(x) for key, x in newest.items()}


def _metrics_by_step(run_dir: Path) -> dict[str, dict[int, float | None]]:
    """Read the values by step, None if not finite; a repeated step has its last values."""
    values: dict[str, dict[int, float | None]] = {name: {} for name in _COMPARED_METRICS}
    for line in read_metrics(run_dir / METRICS):
        for name in _COMPARED_METRICS:
            if (value := getattr(line, name)) is not UNSET:
                values[name][line.step] = value
    return values


def _compare_series(name: str, a: Mapping[int, Any], b: Mapping[int, Any]) -> dict[str, Any]:
    keys = sorted(a.keys() & b.keys())
    steps = ({"step": step, "a": a[step], "b": b[step]} for step in keys)
    first = next((each for each in steps if each["a"] != each["b"]), None)
    only = len(a.keys() ^ b.keys())
    return {"name": name, "compared": len(keys), "only_in_one": only, "first": first}
