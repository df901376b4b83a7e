"""`fsdpctl compare`."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.config_args import ConfigArguments, RanksPerNode, configured, normalized
from fsdpctl.cli.console import add_row, new_table, note, say, show_table
from fsdpctl.config.keys import Key
from fsdpctl.errors import UsageError
from fsdpctl.io.files import refusing
from fsdpctl.tools.compare.row import NOT_REACHED, OK, REFUSED

if TYPE_CHECKING:
    from fsdpctl.tools.compare.measure import MeasuredComparison
    from fsdpctl.tools.compare.report import ComparisonInfo
    from fsdpctl.tools.compare.row import Row
    from fsdpctl.tools.compare.simulate import SimulatedComparison
    from fsdpctl.tools.compare.vary import Variant

_STEPS = Key("--steps", "whole number", 20, "", minimum=4, maximum=1_000_000)
_ROUNDS = Key("--rounds", "whole number", 3, "", minimum=1, maximum=1_000)


@configured
def compare(  # noqa: PLR0913  # each is an option
    asked: ConfigArguments,
    steps: Annotated[str, typer.Option(metavar="N", help="Steps of each run.")] = "20",
    rounds: Annotated[
        str, typer.Option(metavar="N", help="Runs of each variant, alternating with the others.")
    ] = "3",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory to keep the runs in, with a page, charts, CSV and JSON."
        ),
    ] = None,
    write_recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write the best variant to.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    nproc_per_node: RanksPerNode = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Predict for `cluster` or its profile, run nothing.")
    ] = False,
) -> None:
    """Compare variants by short runs or simulation.

    Prints a table of speed, memory and loss, and recommends a variant. Commas separate
    alternatives, as in `strategy=full_shard,no_shard train.micro_batch_size=1,2`. Without any, all
    strategies are compared. `--simulate cluster=h100 launch.nnodes=2,4,8` needs no GPU.
    """
    from fsdpctl.tools.compare.vary import check_recipe_file

    length, number = int(str(_STEPS.parse(steps))), int(str(_ROUNDS.parse(rounds)))
    asked = normalized(asked, nproc_per_node)
    found = _variants(asked, length)
    file = None if write_recipe is None else check_recipe_file(write_recipe)
    command = _Command(asked, length, number, as_json=as_json, simulates=simulate)
    with ExitStack() as stack:
        folder = None if out is None else _new_folder(out.expanduser())
        runs = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdpctl-")))
        rows = command.run(found, runs, folder)
    if file is not None:
        command.write_recipe(file, found, rows)
    failed = [row for row in rows if row.status != OK]
    if len(failed) == len(rows) or (failed and not simulate):  # a simulated one may lack memory
        raise typer.Exit(1)


@dataclass(slots=True)
class _Command:
    """One comparison and its report."""

    asked: ConfigArguments  # normalized
    length: int
    num_rounds: int
    as_json: bool = field(kw_only=True)
    simulates: bool = field(kw_only=True)
    about: "ComparisonInfo | None" = None

    def run(self, found: "list[Variant]", runs: Path, folder: Path | None) -> "list[Row]":
        """Measure or predict all variants; report the results so far even if it is stopped."""
        comparison = self._comparison(found, runs, is_kept=folder is not None)
        is_complete = False
        try:
            comparison.run()
            is_complete = True
            if folder is not None:
                comparison.find_largest()
        finally:
            self._report(comparison, folder, is_complete=is_complete)
        return comparison.rows

    def _comparison(
        self, found: "list[Variant]", runs: Path, *, is_kept: bool
    ) -> "MeasuredComparison | SimulatedComparison":
        if self.simulates:
            from fsdpctl.tools.compare.simulate import SimulatedComparison

            return SimulatedComparison(found)
        from fsdpctl.tools.compare.measure import MeasuredComparison

        return MeasuredComparison(
            found, runs, num_rounds=self.num_rounds, is_kept=is_kept, say=note
        )

    def _report(
        self,
        comparison: "MeasuredComparison | SimulatedComparison",
        folder: Path | None,
        *,
        is_complete: bool,
    ) -> None:
        from fsdpctl.tools.compare.report import PAGE, as_json, describe, write_report
        from fsdpctl.tools.compare.simulate import SimulatedComparison

        rows = comparison.rows
        if rows and all(row.status.startswith(REFUSED) for row in rows):
            others = f" (and {len(rows) - 1} more variants)" if len(rows) > 1 else ""
            raise UsageError(f"{rows[0].status.removeprefix(REFUSED)}{others}")
        if all(row.status == NOT_REACHED for row in rows):
            return
        self.about = describe(
            comparison.configs,
            rows,
            is_predicted=self.simulates,
            how=self._how(),
            command=self._command(),
            is_complete=is_complete,
        )
        if folder is not None:
            write_report(rows, self.about, folder)
            if isinstance(comparison, SimulatedComparison):
                comparison.write_traces(folder)
        if self.as_json:
            say(as_json(rows))
        else:
            _show(rows)
        if folder is not None:
            note(f"written: {folder / PAGE}")

    def _how(self) -> str:
        if self.simulates:
            return "simulation of the planned step on streams and links; nothing ran"
        rounds = "1 run" if self.num_rounds == 1 else f"{self.num_rounds} rounds"
        return f"{rounds} of {self.length} steps per variant"

    def _command(self) -> str:
        from fsdpctl.tools.compare.report import command_of

        recipe, config_dir = self.asked.recipe, self.asked.config_dir
        options = ["--steps", str(self.length), "--rounds", str(self.num_rounds)]
        if self.simulates:
            options = ["--simulate"]
        options += ["--recipe", recipe] if recipe else []
        options += ["--config-dir", str(config_dir)] if config_dir else []
        return command_of(self.asked.settings or [], options)

    def write_recipe(self, path: Path, found: "list[Variant]", rows: "list[Row]") -> None:
        """Write the best variant, if any ran."""
        from fsdpctl.tools.compare.recommendation import recommend
        from fsdpctl.tools.compare.vary import write_recipe

        recommended = recommend(rows)
        if recommended.best is None or self.about is None:
            note(f"{path}: not written, because no variant ran")
            return
        about = [
            f"{recommended.best.label}: best of {len(rows)} variants of `{self.about.command}`.",
            f"{self.about.title}: {self.about.how}, {self.about.created_at}.",
            recommended.text,
        ]
        best = found[rows.index(recommended.best)]
        _, recipe, config_dir = self.asked
        write_recipe(path, best, about, recipe=recipe, config_dir=config_dir)
        note(f"written: {path}")


def _variants(asked: ConfigArguments, steps: int) -> "list[Variant]":
    """Return the variants to compare, and print which settings and combinations are ignored."""
    from fsdpctl.tools.compare.vary import distinct, possible, variants

    found = variants(list(asked.settings or []), asked.recipe, asked.config_dir, steps=steps)
    found, lacking = possible(found)
    found, same = distinct(found)
    for line in (*lacking, *same):
        note(line)
    for name in {name for each in found for name in each.composed.dropped}:
        note(f"recipe's {name} ignored: {name.split('.')[0]} is set on the command line")
    return found


def _show(rows: "list[Row]") -> None:
    from fsdpctl.tools.compare.recommendation import failures, losses, recommend
    from fsdpctl.tools.compare.row import columns

    shown = columns(rows)
    table = new_table(
        *(column.title for column in shown),
        right=[column.title for column in shown if not column.is_text],
    )
    for cells in zip(*(column.cells for column in shown), strict=True):
        add_row(table, *cells)
    show_table(table)
    for line in (*failures(rows), *losses(rows), f"recommended: {recommend(rows).text}"):
        say(line)


def _new_folder(folder: Path) -> Path:
    with refusing(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: not an empty directory")
    return folder
