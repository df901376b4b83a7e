"""`fsdpctl estimate-memory`: options, and the checks that run before torch is imported."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.commands.config_args import (
    YAML,
    Recipe,
    SettingArgs,
    check_choice,
    normalize,
    note_changes,
)
from fsdpctl.commands.convert import settings_without_recipe
from fsdpctl.commands.printing import AsJson
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import DoesNotFitError, UsageError
from fsdpctl.importers.readers import is_accelerate, read_other_tool
from fsdpctl.io.resources import without_gc

_FIT_CHOICES = ("micro_batch", "seq_len", "model")


# The garbage collector would take a quarter of a large estimate's time, and free 1% of the memory.
@without_gc()
def estimate_memory(  # noqa: PLR0913  # each is an option
    settings: SettingArgs = None,
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
            help="Another tool's file, then accelerate's, if any. For several, or a directory, "
            "prints a line each.",
        ),
    ] = None,
) -> None:
    """Estimate peak memory per rank before a run.

    Takes the settings of `train`, for hardware that need not exist: `cluster=h100 launch.nnodes=4`.
    `auto` is resolved for `cluster`. `cluster.memory=80GiB` sets the memory of a rank.
    """
    check_choice("--fit", fit, _FIT_CHOICES)
    if print_config and (source or all_strategies or plot or as_json):
        problem = "conflicts with --from, --all-strategies, --plot and --json"
        next_step = "`fsdpctl convert` writes the recipe of a file"
        raise UsageError(f"--print-config: {problem}; {next_step}")
    arguments = normalize(settings, recipe)
    file_groups = _group_files(source or [])
    is_single = len(file_groups) <= 1 and not any(map(Path.is_dir, source or []))
    if not is_single and (all_strategies or fit or plot or as_json):
        raise UsageError("--from: --all-strategies, --fit, --plot and --json take a single file")
    overrides = settings_without_recipe(file_groups[0][0], arguments) if file_groups else []
    if not is_single:
        compose_config(overrides)
        from fsdpctl.commands.estimate_work import show_verdicts

        raise typer.Exit(show_verdicts(file_groups, overrides, require_fit=require_fit))
    if file_groups:
        translation = read_other_tool(*file_groups[0])
        # Imports torch, as the work below.
        from fsdpctl.estimate.imported_config import import_config

        imported = import_config(translation, overrides)
        composed = imported.composed
    else:
        imported, composed = None, compose_config(arguments.settings, arguments.recipe)
        if not as_json and not print_config:
            note_changes(composed)
    from fsdpctl.commands import estimate_work

    if print_config:
        fits = estimate_work.print_recipe(composed, fit)
    else:
        fits = estimate_work.show_estimates(
            composed, imported, all_strategies=all_strategies, fit=fit, plot=plot, as_json=as_json
        )
    if require_fit and not fits:
        raise typer.Exit(DoesNotFitError.exit_code)


def _group_files(sources: Sequence[Path]) -> list[tuple[Path, ...]]:
    """Return the files of each run that `--from` names; of a directory, all YAML files below it.

    A group is a training file, or a training file and accelerate's. Accelerate's file comes second,
    unless there are only two files. Links within a directory are not followed.
    """
    groups: list[tuple[Path, ...]] = []
    was_accelerate: bool | None = None  # the previous file; None: its group is complete
    for source in sources:
        if not source.is_dir():
            if len(sources) > 1 and not source.exists():
                raise UsageError(f"--from {source}: not found")
            kind = is_accelerate(source) if len(sources) > 1 else None
            is_pair = was_accelerate is not None and kind is (not was_accelerate)
            # Accelerate's file comes second; or first, if there are two files.
            if is_pair and (kind or len(sources) == 2):
                groups[-1], was_accelerate = (*groups[-1], source), None
            else:
                groups.append((source,))
                was_accelerate = kind
            continue
        was_accelerate = None
        below = (each for each in source.rglob("*") if each.suffix in YAML)
        files = sorted(each for each in below if each.is_file() and not each.is_symlink())
        if not files:
            raise UsageError(f"--from {source}: contains no YAML file")
        groups += [(each,) for each in files]
    return groups
