"""`fsdpctl train`."""

from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.choosing import decide, print_chosen
from fsdpctl.cli.console import CONVERSATIONS, bytes_bar, count_of, out, say
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

        say(config_to_yaml(print_chosen(composed, resume).config).rstrip())
    elif dry_run:
        _dry_run(composed, resume)
    else:
        options = [f"--recipe {recipe}"] if recipe else []
        try:
            run(composed, [*options, *(words or [])], resume)
        except StoppedError:
            raise StoppedError(TOO_EARLY) from None


def _dry_run(composed: "Composed", resume: str) -> None:
    from fsdpctl.estimate.automatic import resolved_with_stand_ins
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.kept import estimate_here
    from fsdpctl.run.directory import plan_start
    from fsdpctl.train.describe import describe_run, describe_units

    # Whoever starts it: it may be looked at from where no launcher is.
    with count_of(CONVERSATIONS) as advance:
        run = resolved_with_stand_ins(composed, composed.config.launch, advance)
    composed, run, chosen = decide(composed, run, resume)
    start = plan_start(run.config, resume)
    estimate = estimate_here(run, Estimator())
    for line in [*chosen, *describe_run(run, start, estimate), "", *describe_units(run)]:
        say(line)
    _show_samples(run)
    _check_large_token_files(run)
    would = "it would run" if estimate.verdict == "fits" else "it would run out of memory"
    say(f"\n{would}; nothing was trained")


def _show_samples(run: "ResolvedRun") -> None:
    """The first conversations as they are trained, and how long all are."""
    from fsdpctl.data.chats.open import open_chats
    from fsdpctl.data.chats.preview import histogram, preview

    if not run.config.data.holds_documents:
        return
    chats = open_chats(run.config.data)
    marked = "in colour" if out.is_terminal and not out.no_color else "in brackets"
    for number, text in enumerate(
        preview(chats.train, chats.tokenizer, colour=marked == "in colour"), start=1
    ):
        say(f"\nsample {number}, what has a loss {marked}:")
        out.print(text)
    say("\nlengths of samples:")
    for line in histogram(chats.train):
        say(line)


def _check_large_token_files(run: "ResolvedRun") -> None:
    """Those that are not read before every run."""
    from fsdpctl.data.tokens import check_tokens
    from fsdpctl.resolve.data import CHECKED_BYTES

    large = [file for file in run.data.token_files if file.num_bytes > CHECKED_BYTES]
    with bytes_bar(sum(file.num_bytes for file in large)) as advance:
        for file in large:
            check_tokens(file, advance)
