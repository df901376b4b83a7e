"""`fsdpctl compare`."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fsdpctl.cli.console import note, say, show_table
from fsdpctl.cli.words import Asked, RanksPerNode, configured, settled
from fsdpctl.config.keys import Key
from fsdpctl.errors import UsageError
from fsdpctl.tools.compare.row import NOT_REACHED, OK, REFUSED

if TYPE_CHECKING:
    from fsdpctl.tools.compare.about import About
    from fsdpctl.tools.compare.foresee import Foreseeing
    from fsdpctl.tools.compare.measure import Measurement
    from fsdpctl.tools.compare.row import Row
    from fsdpctl.tools.compare.vary import Variant

_STEPS = Key("--steps", "whole number", 20, "", minimum=4, maximum=1_000_000)
_ROUNDS = Key("--rounds", "whole number", 3, "", minimum=1, maximum=1_000)


@configured
def compare(  # noqa: PLR0913  # each is an option
    asked: Asked,
    steps: Annotated[str, typer.Option(metavar="N", help="Length of each run, in steps.")] = "20",
    rounds: Annotated[
        str, typer.Option(metavar="N", help="How often each variant runs, in turn with the others.")
    ] = "3",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the runs, with a page, charts, CSV and JSON."),
    ] = None,
    write_recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best variant as a recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    nproc_per_node: RanksPerNode = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run nothing: foresee, on `cluster` or its profile.")
    ] = False,
) -> None:
    """Compare variants by short runs, in rounds, or by what is foreseen of them.

    A table of speed, memory and loss, and which is best. Commas separate alternatives, as in
    `strategy=full_shard,no_shard train.micro_batch_size=1,2`; without any, all strategies are
    compared. `--simulate cluster=h100 launch.nnodes=2,4,8` needs no GPU.
    """
    from fsdpctl.tools.compare.recipe import check_recipe_file

    length, number = int(str(_STEPS.parse(steps))), int(str(_ROUNDS.parse(rounds)))
    asked = settled(asked, nproc_per_node)
    found = _variants(asked, length)
    file = None if write_recipe is None else check_recipe_file(write_recipe)
    comparison = _Comparison(asked, length, number, as_json=as_json, simulates=simulate)
    with ExitStack() as stack:
        folder = None if out is None else _made(out.expanduser())
        runs = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdpctl-")))
        rows = comparison.run(found, runs, folder)
    if file is not None:
        comparison.write_recipe(file, found, rows)
    failed = [row for row in rows if row.status != OK]
    if len(failed) == len(rows) or (failed and not simulate):  # to foresee what lacks room is well
        raise typer.Exit(1)


@dataclass(slots=True)
class _Comparison:
    """One comparison, and how it is told of."""

    asked: Asked  # settled
    length: int
    num_rounds: int
    as_json: bool = field(kw_only=True)
    simulates: bool = field(kw_only=True)
    about: "About | None" = None

    def run(self, found: "list[Variant]", runs: Path, folder: Path | None) -> "list[Row]":
        """Measure or foresee, and tell what is known; also when it is stopped."""
        contest = self._contest(found, runs, is_kept=folder is not None)
        is_whole = False
        try:
            contest.run()
            is_whole = True
            if folder is not None:
                contest.find_largest()
        finally:
            self._tell(contest, folder, is_whole=is_whole)
        return contest.rows

    def _contest(
        self, found: "list[Variant]", runs: Path, *, is_kept: bool
    ) -> "Measurement | Foreseeing":
        from fsdpctl.tools.compare.foresee import Foreseeing
        from fsdpctl.tools.compare.measure import Measurement

        if self.simulates:
            return Foreseeing(found)
        return Measurement(found, runs, num_rounds=self.num_rounds, is_kept=is_kept, say=note)

    def _tell(
        self, contest: "Measurement | Foreseeing", folder: Path | None, *, is_whole: bool
    ) -> None:
        from fsdpctl.tools.compare.about import about_comparison
        from fsdpctl.tools.compare.foresee import Foreseeing
        from fsdpctl.tools.compare.report import PAGE, as_json, write_report

        rows = contest.rows
        _refuse_if_none_could_run(rows)
        if all(row.status == NOT_REACHED for row in rows):
            return
        self.about = about_comparison(
            contest.configs,
            rows,
            is_foreseen=self.simulates,
            how=self._how(),
            command=self._command(),
            is_whole=is_whole,
        )
        if folder is not None:
            write_report(rows, self.about, folder)
            if isinstance(contest, Foreseeing):
                contest.write_traces(folder)
        if self.as_json:
            say(as_json(rows))
        else:
            _show(rows)
        if folder is not None:
            note(f"written: {folder / PAGE}")

    def _how(self) -> str:
        if self.simulates:
            return "the plan's events on streams and links; nothing ran"
        if self.num_rounds == 1:
            return f"1 run of {self.length} steps each"
        return f"{self.num_rounds} rounds of {self.length} steps each"

    def _command(self) -> str:
        from fsdpctl.tools.compare.about import command_of

        recipe, config_dir = self.asked.recipe, self.asked.config_dir
        options = ["--steps", str(self.length), "--rounds", str(self.num_rounds)]
        if self.simulates:
            options = ["--simulate"]
        options += ["--recipe", recipe] if recipe else []
        options += ["--config-dir", str(config_dir)] if config_dir else []
        return command_of(self.asked.words or [], options)

    def write_recipe(self, path: Path, found: "list[Variant]", rows: "list[Row]") -> None:
        """The best of what ran, if anything did."""
        from fsdpctl.tools.compare.judge import recommend
        from fsdpctl.tools.compare.recipe import write_recipe

        said = recommend(rows)
        if said.best is None or self.about is None:
            note(f"{path}: not written, as no variant ran")
            return
        best = found[rows.index(said.best)]
        about = [
            f"{said.best.label}: the best of {len(rows)} variants of `{self.about.command}`.",
            f"{self.about.title}: {self.about.how}, {self.about.made}.",
            said.text,
        ]
        _, recipe, config_dir = self.asked
        write_recipe(path, best, about, recipe=recipe, config_dir=config_dir)
        note(f"written: {path}")


def _variants(asked: Asked, steps: int) -> "list[Variant]":
    """What is to be run; says what of what was asked for is not."""
    from fsdpctl.tools.compare.vary import distinct, possible, variants

    found = variants(list(asked.words or []), asked.recipe, asked.config_dir, steps=steps)
    found, lacking = possible(found)
    found, same = distinct(found)
    for line in (*lacking, *same):
        note(line)
    for name in {name for each in found for name in each.composed.dropped}:
        note(f"recipe's {name} left out: {name.split('.')[0]} is chosen here")
    return found


def _show(rows: "list[Row]") -> None:
    from fsdpctl.tools.compare.judge import failures, losses, recommend
    from fsdpctl.tools.compare.table import columns

    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = columns(rows)
    for column in shown:
        table.add_column(column.title, justify="left" if column.is_text else "right")
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*map(escape, cells))
    show_table(table)
    for line in (*failures(rows), *losses(rows), f"recommended: {recommend(rows).text}"):
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
