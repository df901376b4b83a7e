"""`fsdpctl compare-runs`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fsdpctl.cli.console import bytes_bar, emit, say, show_table
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.console import printable

if TYPE_CHECKING:
    from fsdpctl.tools.tensors import CheckpointDifference, TensorDifference
    from fsdpctl.tools.two_runs import ComparedStep, TwoRuns

_SHOWN = 20  # tensors
_NOT_SET = "not set"


def compare_runs(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run directory.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run directory to compare with.")],
    assert_equal: Annotated[
        bool,
        typer.Option(
            "--assert-equal",
            help="Exit with code 1 unless losses and tensors are equal; settings may differ.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how two existing runs differ.

    Compares losses, settings, and the tensors of the newest checkpoints of a common step.
    """
    from fsdpctl.tools.two_runs import compare_runs as compare

    found = compare(run_a, run_b, bytes_bar)
    if as_json:
        emit(json.dumps(found.to_dict(), indent=2))
    else:
        _show(found)
    if assert_equal and found.differences:
        raise FsdpctlError(f"{run_a} and {run_b} differ: {'; '.join(found.differences)}")


def _show(found: "TwoRuns") -> None:
    say(f"A       {found.a}")
    say(f"B       {found.b}")
    say()
    show_table(_losses(found))
    for line in _steps(found):
        say(line)
    say()
    if found.configuration:
        rows = [[x.key, x.a or _NOT_SET, x.b or _NOT_SET] for x in found.configuration]
        show_table(_table(("configuration", "A", "B"), rows, left=3))
    else:
        say("configurations are equal")
    say()
    for line in _tensors(found):
        say(line)
    say()
    say(
        f"differ  {'; '.join(found.differences)}"
        if found.differences
        else "equal   everything compared"
    )


def _losses(found: "TwoRuns") -> Table:
    rows = []
    for each in found.series.values():
        if not each.compared:
            rows.append([each.name, "0", "-", "-", "-"])
        elif each.first is None or each.largest is None:
            rows.append([each.name, f"{each.compared:,}", "equal", "-", "-"])
        else:
            largest = f"{each.largest.difference:.3g} at step {each.largest.step}"
            at = f"step {each.first.step}: {_pair(each.first)}"
            rows.append(
                [each.name, f"{each.compared:,}", f"{each.num_different:,} differ", at, largest]
            )
    return _table(("metric", "steps", "", "first difference", "largest difference"), rows)


def _steps(found: "TwoRuns") -> Iterator[str]:
    loss = found.series["loss"]
    for name, count in (("A", loss.only_a), ("B", loss.only_b)):
        if count:
            yield f"{count:,} steps only in {name}"


def _pair(point: "ComparedStep") -> str:
    return " and ".join("not finite" if x is None else f"{x:.9g}" for x in (point.a, point.b))


def _tensors(found: "TwoRuns") -> Iterator[str]:
    checkpoint = found.checkpoint
    if checkpoint is None:
        yield "no common step with a checkpoint"
        return
    different = checkpoint.different
    yield (
        f"checkpoints of step {checkpoint.step}: {len(checkpoint.tensors)} tensors in both, "
        f"{len(different) or 'none'} differ"
    )
    if different:
        head = ("tensor, worst first", "elements", "differing", "largest", "relative norm", "")
        show_table(_table(head, [_row(each) for each in different[:_SHOWN]], right=4))
    if len(different) > _SHOWN:
        yield f"and {len(different) - _SHOWN} more (see --json)"
    yield from _missing(checkpoint)


def _row(each: "TensorDifference") -> list[str]:
    largest = "not finite" if each.max_abs is None else f"{each.max_abs:.3g}"
    norm = "-" if each.relative_norm is None else f"{each.relative_norm:.3g}"
    if each.about and not each.num_different:
        largest = norm = "-"
    return [each.key, f"{each.numel:,}", f"{each.num_different:,}", largest, norm, each.about]


def _missing(checkpoint: "CheckpointDifference") -> Iterator[str]:
    for name, keys in (("A", checkpoint.only_a), ("B", checkpoint.only_b)):
        if keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            yield f"only in {name}: {', '.join(keys[:_SHOWN])}{more}"


def _table(head: tuple[str, ...], rows: list[list[str]], *, left: int = 1, right: int = 0) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(head):
        is_number = left <= number <= max(right, 1)
        table.add_column(name, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
