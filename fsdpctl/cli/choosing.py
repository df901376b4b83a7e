"""What commands do where a configuration leaves something to be chosen."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fsdpctl.cli.console import CONVERSATIONS, count_of, note

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed
    from fsdpctl.estimate.choice import Choice
    from fsdpctl.resolve.run import ResolvedRun


class Decided(NamedTuple):
    """What is done, and how that came about."""

    composed: "Composed"  # what was asked for, with what was chosen
    run: "ResolvedRun"
    lines: list[str]  # to be said of it


def decide(
    composed: "Composed", run: "ResolvedRun", resume: str, *, probes: bool = False
) -> Decided:
    """Choose what `composed` leaves open: as a run that goes on has it, else by what is foreseen.

    Args:
        composed: what was asked for.
        run: the same, with something in the place of what is left open.
        resume: as typed; only `auto` goes on in the same directory.
        probes: whether candidates may be run here, where that is asked for.

    Raises:
        UsageError: nothing fits, or too little is known of the hardware.
    """
    from fsdpctl.config.choosing import left_open
    from fsdpctl.estimate.automatic import with_chosen
    from fsdpctl.resolve.run import resolved_again
    from fsdpctl.train.choices import describe_choice, describe_kept, kept_choice, with_share

    names = left_open(composed.config)
    if not names:
        return Decided(composed, run, [])
    run_dir = Path(str(run.config.train.run_dir))
    chosen = kept_choice(run_dir) if resume == "auto" else None
    if chosen is None:
        choice = _choose(composed, run, probes=probes)
        chosen, lines = choice.chosen, describe_choice(choice)
    else:
        lines = [describe_kept(chosen, names, run_dir)]
    made = with_chosen(composed, with_share(chosen, run.batches))
    return Decided(made, resolved_again(run, made.config), lines)


def _choose(composed: "Composed", run: "ResolvedRun", *, probes: bool) -> "Choice":
    from fsdpctl.estimate.automatic import chosen_for_run, chosen_on_cluster
    from fsdpctl.resolve.machine import HERE

    config = composed.config
    is_here = config.cluster.name == HERE
    note("choosing what fits and is foreseen fastest")
    if not is_here and not probes:  # nothing runs: it may be for another machine
        return chosen_on_cluster(config)
    choice = chosen_for_run(run, config)
    if not (is_here and probes and config.auto.probe):
        return choice
    from fsdpctl.tools.compare.probe import probed

    return probed(choice, run, config, note)


def print_chosen(composed: "Composed", resume: str) -> "Composed":
    """What was asked for with what is chosen, of which standard error is told."""
    from fsdpctl.config.choosing import left_open
    from fsdpctl.estimate.automatic import chosen_on_cluster, resolved_with_stand_ins, with_chosen
    from fsdpctl.resolve.machine import HERE
    from fsdpctl.train.choices import describe_choice

    if not left_open(composed.config):
        return composed
    if composed.config.cluster.name != HERE:
        choice = chosen_on_cluster(composed.config)
        found, lines = with_chosen(composed, choice.chosen), describe_choice(choice)
    else:
        with count_of(CONVERSATIONS) as advance:
            run = resolved_with_stand_ins(composed, composed.config.launch, advance)
        found, _, lines = decide(composed, run, resume)
    for line in lines:
        note(line)
    return found


def chosen_lines(choice: "Choice | None") -> list[str]:
    """What was chosen, if anything was; or that nothing fits, and what is shown instead."""
    from fsdpctl.train.choices import describe_choice

    if choice is None:
        return []
    return describe_choice(choice) if choice.ranked else [f"chosen  {choice.lacks}"]
