"""`fsdpctl train`."""

from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.console import bytes_bar, say
from fsdpctl.cli.ending import TOO_EARLY
from fsdpctl.cli.running import run
from fsdpctl.cli.words import (
    Asked,
    ConfigDir,
    RanksPerNode,
    Recipe,
    Words,
    composed_from,
    settled,
)
from fsdpctl.errors import StoppedError

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed
    from fsdpctl.resolve.run import ResolvedRun


def train(
    words: Words = None,
    recipe: Recipe = None,
    config_dir: ConfigDir = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: go on where the run was. never: start a new run beside it. PATH: start a "
            "new run from the full state of that run or checkpoint.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check that it would run, show units; train nothing.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration and end.")
    ] = False,
    nproc_per_node: RanksPerNode = None,
) -> None:
    """Train a model. The same command again resumes where the last one ended."""
    words, recipe, config_dir = settled(Asked(words, recipe, config_dir), nproc_per_node)
    composed = composed_from(words, recipe, config_dir, quiet=print_config)
    if print_config:
        from fsdpctl.config.serialize import config_to_yaml

        say(config_to_yaml(composed.config).rstrip())
    elif dry_run:
        _dry_run(composed, resume)
    else:
        options = [f"--recipe {recipe}"] if recipe else []
        try:
            run(composed, [*options, *(words or [])], resume)
        except StoppedError:
            raise StoppedError(TOO_EARLY) from None


def _dry_run(composed: "Composed", resume: str) -> None:
    from fsdpctl.estimate.kept import estimate_here
    from fsdpctl.resolve.run import resolve
    from fsdpctl.train.describe import describe_run, describe_units
    from fsdpctl.train.run_dir import plan_start

    # Whoever starts it: it may be looked at from where no launcher is.
    run = resolve(composed, composed.config.launch)
    start = plan_start(run.config, resume)
    estimate = estimate_here(run)
    for line in [*describe_run(run, start, estimate), "", *describe_units(run)]:
        say(line)
    _check_large_token_files(run)
    would = "it would run" if estimate.verdict == "fits" else "it would run out of memory"
    say(f"\n{would}; nothing was trained")


def _check_large_token_files(run: "ResolvedRun") -> None:
    """Those that are not read before every run."""
    from fsdpctl.data.tokens import check_tokens
    from fsdpctl.resolve.run import CHECKED_BYTES

    large = [file for file in run.data.token_files if file.num_bytes > CHECKED_BYTES]
    with bytes_bar(sum(file.num_bytes for file in large)) as advance:
        for file in large:
            check_tokens(file, advance)
