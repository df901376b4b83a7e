"""`fsdpctl compare`: options, work and printed table."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.commands.compare.budget import add_budget, budget_lines
from fsdpctl.commands.compare.report import (
    COLUMNS,
    NOT_REACHED,
    OK,
    REFUSED,
    SORT_KEYS,
    cells,
    comparison_title,
    loss_lines,
    rows_as_json,
    sorted_rows,
    varied_names,
    write_report,
)
from fsdpctl.commands.compare.results import measure, predict
from fsdpctl.commands.compare.variants import (
    WITHOUT_SHARED_MEMORY,
    Variant,
    all_equivalent,
    drop_duplicates,
    drop_unsupported,
    variants_of,
)
from fsdpctl.commands.config_args import (
    ConfigArguments,
    Recipe,
    SettingArgs,
    check_choice,
    normalize,
)
from fsdpctl.commands.printing import AsJson, emit, note, say, show_table
from fsdpctl.config.keys import Key
from fsdpctl.errors import UsageError
from fsdpctl.estimate.duration import has_length, notes_on_price
from fsdpctl.io.files import os_errors_as

_STEPS = Key("--steps", "whole number", 20, "", within=(4, 1_000_000))
_BUDGET = Key("--budget", "number", None, "", within=(0.01, 1e12))


def compare(  # noqa: PLR0913  # each is an option
    settings: SettingArgs = None,
    recipe: Recipe = None,
    steps: Annotated[str, typer.Option(metavar="N", help="Steps of each run.")] = "20",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory to keep the runs in, with a picture and JSON."),
    ] = None,
    as_json: AsJson = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Predict for `cluster`, run nothing.")
    ] = False,
    by: Annotated[
        str,
        typer.Option(metavar="|".join(SORT_KEYS), help="Sort by this column, the lowest first."),
    ] = "time",
    budget: Annotated[
        str | None, typer.Option(metavar="MONEY", help="With --simulate: what MONEY buys of each.")
    ] = None,
) -> None:
    """Compare variants by short runs or simulation.

    Prints a table of speed, memory and loss, the best variant first. Commas separate
    alternatives, as in `strategy=full_shard,no_shard train.micro_batch_size=1,2`. Without any, all
    strategies are compared. `--simulate cluster=8xa100_80,8xh100 train.tokens=10e9` needs no GPU.
    """
    check_choice("--by", by, SORT_KEYS)
    num_steps = int(str(_STEPS.parse(steps)))
    money = None if budget is None else float(str(_BUDGET.parse(budget)))
    if money is not None and not simulate:
        raise UsageError("--budget: only valid with --simulate")
    compared = _variants(normalize(settings, recipe), simulates=simulate)
    configs = [each.composed.config for each in compared]
    if by == "cost" and not all(x.cluster.price is not None and has_length(x) for x in configs):
        raise UsageError("--by cost: requires cluster.price and a length such as train.tokens=10e9")
    with ExitStack() as stack:
        folder = None if out is None else _new_folder(out.expanduser())
        runs = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdpctl-")))
        notes: list[str] = []
        try:
            if simulate:
                notes.extend(predict(compared))
            else:
                measure(compared, runs, num_steps, is_kept=folder == runs)
        finally:  # an interrupted comparison prints its results so far
            _report(
                compared, folder, notes, is_predicted=simulate, by=by, as_json=as_json, budget=money
            )
    failed = [each.result.status != OK for each in compared]
    if all(failed) or (any(failed) and not simulate):  # simulated variants may not fit
        raise typer.Exit(1)


def _report(
    compared: Sequence[Variant], folder: Path | None, notes: Sequence[str], *,
    is_predicted: bool, by: str, as_json: bool, budget: float | None,
) -> None:  # fmt: skip
    """Print the results, and `notes` on predictions."""
    rows = sorted_rows([each.result for each in compared], by)
    for row in rows:  # an interruption may have prevented the run of a variant
        row.status = NOT_REACHED if row.status == OK and not row.speed else row.status
    if rows and all(row.status.startswith(REFUSED) for row in rows):
        more = f" (and {len(rows) - 1} more variants)" if len(rows) > 1 else ""
        raise UsageError(f"{rows[0].status.removeprefix(REFUSED)}{more}")
    if all(row.status == NOT_REACHED for row in rows):
        return
    if budget is not None:
        add_budget(rows, budget)
        notes = [*notes, *(x for each in compared for x in notes_on_price(each.config))]
    title = comparison_title([x.config for x in compared], rows, is_predicted=is_predicted)
    written = []
    if folder is not None:
        with os_errors_as(f"--out {folder}"):
            written = write_report(rows, title, folder, by)
    if as_json:
        emit(rows_as_json(rows))
    else:
        names = varied_names(rows)
        show_table([*names, *COLUMNS], (cells(row, names) for row in rows), right=COLUMNS)
        say(*(f"{row.label}: {row.status}" for row in rows if row.status != OK), *loss_lines(rows))
        say(*(() if budget is None else budget_lines(rows, budget)))
    note(*dict.fromkeys(notes), *(f"written: {path}" for path in written))


def _variants(arguments: ConfigArguments, *, simulates: bool) -> list[Variant]:
    """Return the variants to compare, and print which settings and combinations are ignored."""
    expand = partial(variants_of, recipe=arguments.recipe, simulates=simulates)
    compared = expand(arguments.settings)
    if all_equivalent(compared, simulates=simulates):
        compared = expand([*arguments.settings, WITHOUT_SHARED_MEMORY])
        note(f"{WITHOUT_SHARED_MEMORY}: with shared memory, all strategies would run alike")
    compared, unsupported = drop_unsupported(compared)
    compared, duplicates = drop_duplicates(compared)
    ignored = dict.fromkeys(x for each in compared for x in each.composed.ignored_lines)
    note(*unsupported, *duplicates, *ignored)
    return compared


def _new_folder(folder: Path) -> Path:
    with os_errors_as(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: not an empty directory")
    return folder
