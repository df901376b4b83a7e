"""What a run that goes on keeps of what was chosen for it, and what is said of a choice."""

from dataclasses import replace
from pathlib import Path

from fsdpctl.config.choosing import words_of
from fsdpctl.config.model_path import RUN_CONFIG
from fsdpctl.config.schema import Config
from fsdpctl.estimate.choice import Candidate, Choice
from fsdpctl.plan.batch import BatchPlan
from fsdpctl.resolve.machine import world_size
from fsdpctl.run.directory import read_config
from fsdpctl.run.progress import format_bytes


def kept_choice(run_dir: Path) -> Config | None:
    """The configuration that a run was last started with, where it was.

    Raises:
        UsageError: it is damaged.
    """
    return read_config(run_dir) if (run_dir / RUN_CONFIG).is_file() else None


def with_share(chosen: Config, batches: BatchPlan) -> Config:
    """What was chosen for other ranks, with no larger a micro-batch than a rank now has samples."""
    share = -(-batches.global_batch_size // batches.world_size)
    size = min(chosen.train.micro_batch_size or share, share)
    return replace(chosen, train=replace(chosen.train, micro_batch_size=size))


def describe_kept(kept: Config, names: tuple[str, ...], run_dir: Path) -> str:
    """That a run goes on with what was chosen before."""
    return f"{'chosen':<8}{words_of(kept, names)}, as {run_dir / RUN_CONFIG} says"


def describe_choice(choice: Choice) -> list[str]:
    """What was chosen, why, and what the runner-up would have cost."""
    rows = [("chosen", choice.words(choice.chosen)), ("why", _why(choice)), ("next", _next(choice))]
    if choice.probing:
        rows.append(("probed", _probed(choice)))
    return [f"{name:<8}{text}" for name, text in rows]


def _why(choice: Choice) -> str:
    first = choice.ranked[0]
    fastest = min(each.seconds for each in choice.ranked)
    among = f"of {choice.count} combinations on {_ranks(first.config)}"
    reason = "the fastest that fits"
    if first.measured is not None:
        reason = "the fastest of those that were probed"
    elif fastest < first.seconds:
        reason = "as fast as any that fits, and of least memory"
    return (
        f"{among} {reason}: {first.seconds:.3g} s a step foreseen by {choice.whose}, {_held(first)}"
    )


def _next(choice: Choice) -> str:
    """The runner-up."""
    if len(choice.ranked) == 1:
        return "nothing else fits"
    first, second = choice.ranked[:2]
    seconds, than, how = second.seconds, first.seconds, "foreseen"
    if first.measured is not None and second.measured is not None:
        seconds, than, how = second.measured, first.measured, "measured"
    more = f"{seconds / than - 1:+.1%}"
    return f"{choice.words(second.config)}: {seconds:.3g} s a step {how} ({more}), {_held(second)}"


def _ranks(config: Config) -> str:
    ranks = world_size(config)
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _held(candidate: Candidate) -> str:
    estimate = candidate.estimate
    held, most = format_bytes(estimate.peak_reserved), format_bytes(max(0, estimate.available))
    return f"{held} of {most} a rank"


def _probed(choice: Choice) -> str:
    first = choice.ranked[0].measured
    count = sum(each.measured is not None for each in choice.ranked) + len(choice.failures)
    told = [f"{first:.3g} s a step measured, of {count} candidates", *choice.failures]
    return f"{'; '.join(told)}; this took {choice.probing:.0f} s"
