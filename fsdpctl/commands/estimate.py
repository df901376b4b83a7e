"""`fsdpctl estimate-memory`: its options, and the checks that need no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.commands.config_args import (
    YAML,
    Recipe,
    Settings,
    check_choice,
    normalize,
    note_changes,
)
from fsdpctl.commands.convert import cli_settings
from fsdpctl.commands.printing import AsJson
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import DoesNotFitError, UsageError
from fsdpctl.importers.readers import is_accelerate, read_other_tool
from fsdpctl.io.resources import without_gc

_FIT_CHOICES = ("micro_batch", "seq_len", "model")


@without_gc()  # a quarter of a large estimate's time, for a hundredth of the memory
def estimate_memory(  # noqa: PLR0913  # each is an option
    settings: Settings = None,
    recipe: Recipe = None,
    all_strategies: Annotated[
        bool, typer.Option("--all-strategies", help="Estimate all strategies, one line each.")
    ] = False,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_FIT_CHOICES),
            help="Find the largest micro-batch, sequence length or number of blocks that fits.",
        ),
    ] = None,
    require_fit: Annotated[
        bool,
        typer.Option("--require-fit", help="Exit with code 3 if the configuration does not fit."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory to write a chart of the strategies to."),
    ] = None,
    as_json: AsJson = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the recipe of what is estimated.")
    ] = False,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Configuration file of another tool, as `convert` reads it, with accelerate's "
            "after it; several or a directory: a line for each.",
        ),
    ] = None,
) -> None:
    """Estimate peak memory per rank before a run.

    Takes the settings of `train`, for hardware that need not exist: `cluster=h100 launch.nnodes=4`.
    `auto` is resolved for `cluster`. `cluster.memory=80GiB` sets the memory of a rank.
    """
    check_choice("--fit", fit, _FIT_CHOICES)
    if print_config and (source or all_strategies or plot or as_json):
        why = "conflicts with --from, --all-strategies, --plot and --json"
        raise UsageError(f"--print-config: {why}; `fsdpctl convert` writes the recipe of a file")
    asked = normalize(settings, recipe)
    runs = _runs_of(source or [])
    is_single = len(runs) == len(runs[:1]) and not any(map(Path.is_dir, source or []))
    if not is_single and (all_strategies or fit or plot or as_json):
        raise UsageError("--from: --all-strategies, --fit, --plot and --json take a single file")
    words = cli_settings(runs[0][0], asked) if runs else []
    if not is_single:
        compose_config(words)
        from fsdpctl.commands.estimate_work import show_verdicts

        raise typer.Exit(show_verdicts(runs, words, require_fit=require_fit))
    if runs:
        translation = read_other_tool(*runs[0])
        from fsdpctl.estimate.imported_config import (
            import_config,
        )  # imports torch, as the work below

        others = import_config(translation, words)
        composed = others.composed
    else:
        others, composed = None, compose_config(asked.settings, asked.recipe)
        if not as_json and not print_config:
            note_changes(composed)
    from fsdpctl.commands import estimate_work

    if print_config:
        fits = estimate_work.print_recipe(composed, fit)
    else:
        fits = estimate_work.show_estimates(
            composed, others, every=all_strategies, fit=fit, plot=plot, as_json=as_json
        )
    if require_fit and not fits:
        raise typer.Exit(DoesNotFitError.exit_code)


def _runs_of(sources: Sequence[Path]) -> list[tuple[Path, ...]]:
    """Return the files of each run that `--from` names; of a directory, all YAML files below it.

    A training file and accelerate's file after it, or two of these in any order, are one run. Links
    within a directory are not followed.
    """
    found: list[tuple[Path, ...]] = []
    last: bool | None = None  # whether the file before is accelerate's; None: it has its own
    for source in sources:
        if not source.is_dir():
            if len(sources) > 1 and not source.exists():
                raise UsageError(f"--from {source}: not found")
            kind = is_accelerate(source) if len(sources) > 1 else None
            if last is not None and kind is (not last) and (kind or len(sources) == 2):
                found[-1], last = (*found[-1], source), None
            else:
                found.append((source,))
                last = kind
            continue
        last = None
        below = (each for each in source.rglob("*") if each.suffix in YAML)
        inside = sorted(each for each in below if each.is_file() and not each.is_symlink())
        if not inside:
            raise UsageError(f"--from {source}: contains no YAML file")
        found += [(each,) for each in inside]
    return found
