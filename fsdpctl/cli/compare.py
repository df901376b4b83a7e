"""`fsdpctl compare`."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fsdpctl.cli.console import err, say, show_table
from fsdpctl.cli.words import Asked, ConfigDir, RanksPerNode, Recipe, Words, settled
from fsdpctl.compare import OK, REFUSED
from fsdpctl.config.keys import Key
from fsdpctl.errors import UsageError

if TYPE_CHECKING:
    from fsdpctl.compare.measure import Row

_RESULT = "compare.json"
_STEPS = Key("--steps", "whole number", 20, "", minimum=4, maximum=1_000_000)


def compare(
    words: Words = None,
    recipe: Recipe = None,
    config_dir: ConfigDir = None,
    steps: Annotated[str, typer.Option(metavar="N", help="Length of each run, in steps.")] = "20",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the runs, and the result as compare.json."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    nproc_per_node: RanksPerNode = None,
) -> None:
    """Compare variants by a short run of each.

    A table of speed, memory and loss. Commas separate alternatives, as in
    `strategy=full_shard,no_shard train.micro_batch_size=1,2`; without any, all strategies are
    compared.
    """
    from fsdpctl.compare.measure import measure_all
    from fsdpctl.compare.vary import distinct, variants

    length = int(str(_STEPS.parse(steps)))
    words, recipe, config_dir = settled(Asked(words, recipe, config_dir), nproc_per_node)
    found = variants(list(words or []), recipe, config_dir, steps=length)
    found, same = distinct(found)
    for line in same:
        err.print(line, markup=False)
    for name in {name for each in found for name in each.composed.dropped}:
        err.print(f"recipe's {name} left out: {name.split('.')[0]} is chosen here", markup=False)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdpctl-")))
        if out is not None:
            folder = _made(out.expanduser())
        stack.callback(_show, rows, folder if out else None, as_json=as_json)
        rows.extend(measure_all(found, folder, lambda line: err.print(line, markup=False)))
    if any(row.status != OK for row in rows):
        raise typer.Exit(1)


def _show(rows: "list[Row]", folder: Path | None, *, as_json: bool) -> None:
    """What is there, also when it was stopped."""
    _refuse_if_none_could_run(rows)
    text = json.dumps([row.to_dict() for row in rows], indent=2)
    if folder is not None:
        (folder / _RESULT).write_text(text + "\n")
    if as_json:
        say(text)
    elif rows:
        show_table(_table(rows))
        for row in rows:
            if row.status != OK:
                say(f"{_label(row)}: {row.status}")
        say(_losses(rows))
        for line in _noise(rows):
            say(line)


def _refuse_if_none_could_run(rows: "list[Row]") -> None:
    if rows and all(row.status.startswith(REFUSED) for row in rows):
        others = f" (and {len(rows) - 1} more variants)" if len(rows) > 1 else ""
        raise UsageError(f"{rows[0].status.removeprefix(REFUSED)}{others}")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: is not an empty directory")
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from None
    return folder


def _label(row: "Row") -> str:
    return " ".join(f"{name}={text}" for name, text in row.varied.items()) or row.strategy


def _waiting(row: "Row") -> str:
    """The share of a step in which computation stands still for communication."""
    if row.exposed_communication_seconds is None or not row.step_seconds:
        return "-"
    return f"{row.exposed_communication_seconds / row.step_seconds:.0%}"


def _spread(row: "Row") -> str:
    """How far a quarter of the steps lie from the median at least."""
    if row.tokens_per_second_spread is None or not row.tokens_per_second:
        return "-"
    low, high = (edge / row.tokens_per_second - 1 for edge in row.tokens_per_second_spread)
    return f"{low:+.0%} {high:+.0%}"


def _table(rows: list["Row"]) -> Table:
    from fsdpctl.train.progress import format_bytes

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0].varied or ("strategy",):
        table.add_column(name)
    for name in (
        "tokens/s",
        "quartiles",
        "s/step",
        "waiting",
        "engine bytes",
        "estimated",
        "final loss",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        measured, estimated = row.peak_allocated_bytes, row.estimated_peak_allocated_bytes
        table.add_row(
            *(row.varied.values() or (row.strategy,)),
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            _spread(row),
            "-" if row.step_seconds is None else f"{row.step_seconds:.4f}",
            _waiting(row),
            "-" if measured is None else format_bytes(measured),
            "-" if estimated is None else format_bytes(estimated),
            "-" if row.final_loss is None else f"{row.final_loss:.6f}",
        )
    return table


def _noise(rows: list["Row"]) -> Iterator[str]:
    """Which differences in speed are none."""
    from fsdpctl.compare.measure import as_fast_as_the_fastest

    labels = [_label(row) for row in as_fast_as_the_fastest(rows)]
    if labels and len(rows) > 1:
        alike = ", ".join(labels[1:])
        told = (
            f"its quartiles overlap with those of {alike}" if alike else "by more than the spread"
        )
        yield f"fastest: {labels[0]}, {told}; runs followed one another"


def _losses(rows: list["Row"]) -> str:
    known = [row.final_loss for row in rows if row.final_loss is not None]
    losses = set(known)
    memory = "engine bytes: model, optimizer and buffers of the fullest rank; no activations"
    if len(losses) < 2:
        same = "; all losses are equal" if len(known) > 1 else ""
        return f"{memory}{same}"
    return f"{memory}; losses differ by up to {max(losses) - min(losses):.3g}"
