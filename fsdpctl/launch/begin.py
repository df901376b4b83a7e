"""Begin a run: open it, lock its directory, decide what is `auto`, and write what workers read."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.base import checked_weights
from fsdpctl.checkpoint.folders import complete_checkpoints, newest_checkpoint
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.remote_run import remote_of
from fsdpctl.comm.collectives import Collectives
from fsdpctl.config.auto import Selection, kept_names, left_open, opened
from fsdpctl.config.compose import Composed
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.config.schema import Settled
from fsdpctl.errors import DoesNotFitError
from fsdpctl.estimate.accuracy import TIE
from fsdpctl.estimate.advice import advice
from fsdpctl.estimate.candidates import Candidate, Ranking
from fsdpctl.estimate.changes import Change
from fsdpctl.estimate.estimator import Estimator, write_estimate
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import decide
from fsdpctl.io.activity import Talk, doing
from fsdpctl.io.run_files import CHECKPOINTS, RUN_CONFIG
from fsdpctl.io.texts import format_bytes
from fsdpctl.launch.run_lines import describe_run
from fsdpctl.resolve.launchers import Role
from fsdpctl.resolve.own import Task
from fsdpctl.resolve.place import LOCAL
from fsdpctl.resolve.prepare import Prepared, prepare
from fsdpctl.resolve.settle import RunPlan, settle
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.data_record import check_same_data, write_record
from fsdpctl.run.directory import Look, Standing, look, prepare_run_dir
from fsdpctl.run.heartbeat import RunLock, check_unused, claimed

_MOST_VERIFIED = 16 << 30  # bytes of a checkpoint in a dry run
# By which a selection is made again.
_SELECTED_FOR = ("launch.device", "launch.nnodes", "launch.nproc_per_node", "cluster.memory")


@dataclass(slots=True)
class Begun:
    """A run whose directory is locked and prepared. It holds no data: it may live for days."""

    run_dir: Path
    lock: RunLock
    plan: RunPlan  # of the first round
    config: Settled  # settled for the ranks of the current round
    step: int  # of the checkpoint that the current round starts from

    @property
    def launch(self) -> LaunchConfig:
        return self.config.launch


def begin(
    composed: Composed,
    settings: Sequence[str],
    resume: str,
    talk: Talk,
    role: Role | None = None,
    *,
    task: Task | None = None,
) -> Begun | None:
    """Lock and prepare the run directory; return None if the run is finished.

    `settings` are recorded; `resume` is the value of `--resume`. `task` is that of a script, which
    has no estimate. UsageError if the run is invalid; nothing remains of a directory that was
    created here. DoesNotFitError if its memory does not suffice; likewise.
    """
    found = prepare(composed, role, task=task, resume=resume)
    seen = look(found.config, resume)
    may_lack = seen.source is None and remote_of(seen.config) is not None
    if not may_lack and is_finished(seen, talk.say):
        return None
    waiting = f"waiting for the workers of the last start of {seen.run_dir}"
    with claimed(seen.run_dir, lambda: talk.say(waiting)) as lock:
        seen = look(found.config, resume, seen.run_dir)  # the run may have moved on, or finished
        if seen.standing is Standing.FINISHED:
            _upload_rest(seen)
        if is_finished(seen, talk.say):
            lock.release()
            return None
        assets = check_start(found, seen)
        estimator = Estimator()
        estimate, lines = None, tuple[str, ...]()
        if task is None:
            plan, estimate, lines = decide_run(seen, estimator, talk.note)
        else:
            plan = settle(seen.config)
        described = describe_run(found, plan, seen, estimate)
        for line in (*lines, *described):
            (talk.say if line.startswith("note ") else talk.plan)(line)
        if estimate is not None:
            check_fits(estimate, estimator, talk.say)
        write_record(seen.run_dir, found.data)
        if lacks_link := prepare_run_dir(seen, plan.config, settings, assets):
            talk.say(f"note    {lacks_link}")
        if estimate is not None:
            write_estimate(seen.run_dir, plan, estimate, estimator)
    return Begun(seen.run_dir, lock, plan, plan.config, seen.step)


def check_start(found: Prepared, seen: Look) -> dict[str, bytes]:
    """Check what a start needs besides memory; return the files next to its weights."""
    check_same_data(seen.run_dir, found.data, seen.data_fingerprint)
    if (remote := remote_of(seen.config)) is not None:
        remote.check_writable()
    return collect_assets(seen.config, found.data)


def check_dry(found: Prepared, seen: Look) -> str:
    """Check what a start and its ranks check before the first step; return what it left out."""
    check_start(found, seen)
    check_unused(seen.run_dir)
    newest = newest_checkpoint(seen.run_dir / CHECKPOINTS) if seen.source is None else None
    reader = seen.source if newest is None else CheckpointReader(newest)
    if reader is not None and reader.num_bytes > _MOST_VERIFIED:
        return f"`fsdpctl verify-checkpoint {reader}` verifies the state; "
    if reader is not None:
        with doing(f"verifying {reader}"):
            deque(reader.verify(), 0)
            checked_weights(reader, Collectives())
    return ""


def is_finished(seen: Look, say: Callable[[str], None]) -> bool:
    """Return whether there is nothing to do, and print that."""
    if seen.standing is not Standing.FINISHED:
        return False
    say(f"{seen.source or seen.run_dir}: finished at step {seen.step}; nothing to do")
    train = seen.config.train
    lengths = {"train.epochs": train.epochs, "train.tokens": train.tokens}
    key = next((each for each, value in lengths.items() if value is not None), "train.steps")
    if train.steps is not None and seen.step < train.steps:
        key = "train.patience"
    new = "set another train.run_dir" if seen.config.model.is_own else "pass --resume never"
    say(f"set a larger {key} to continue, or {new} to start a new run")
    return True


def _upload_rest(seen: Look) -> None:
    remote = remote_of(seen.config)
    if remote is None or seen.source is not None:  # newer ones are there
        return
    for folder in complete_checkpoints(seen.run_dir / CHECKPOINTS):
        with doing(f"uploading {folder}"):
            remote.upload(folder)
            remote.remove_old(seen.config.checkpoint, folder)


def check_fits(estimate: RunEstimate, estimator: Estimator, say: Callable[[str], None]) -> None:
    """Print what makes a run fit if it doesn't; DoesNotFitError with `train.require_fit`."""
    if not (lacking := estimate.shortages):
        return
    say(f"{'memory':<8}does not suffice; searching for changes that fit")
    changes = advice(estimator, estimate.plan, more_ranks=False)
    for line in (*change_lines(changes), *(() if changes else sized_for(estimate))):
        say(line)
    if estimate.config.train.require_fit:
        way = "change the settings, or set train.require_fit=false to start nevertheless"
        raise DoesNotFitError(f"{'; '.join(lacking)}; {way}")


def sized_for(estimate: RunEstimate) -> tuple[str, ...]:
    """Return a line that an estimate is for this machine's CPU, if it is and no cluster was set."""
    if (estimate.config.cluster.name, estimate.config.launch.device) != (LOCAL, "cpu"):
        return ()
    sizes = "`fsdpctl estimate-memory … cluster=8xh100` for GPUs (`fsdpctl list cluster`)"
    return (f"{'cluster':<8}sized for this machine's CPU; {sizes}",)


def change_lines(changes: Sequence[tuple[Change, RunEstimate]]) -> list[str]:
    if not changes:
        return ["to fit  no change found that makes it fit"]
    return [
        f"{'to fit' if number == 1 else '':<8}{number}. {' '.join(change.words)}: "
        f"{format_bytes(estimate.peak_reserved)}, {change.figures}".rstrip(", ")
        for number, (change, estimate) in enumerate(changes, start=1)
    ]


def decide_run(
    seen: Look, estimator: Estimator, note: Callable[[str], None]
) -> tuple[RunPlan, RunEstimate, tuple[str, ...]]:
    """Select for the ranks of a run, as `decide`; one that resumes keeps its selection.

    Return the plan, its estimate, and lines that explain the selection.
    """
    if (kept := _kept(seen)) is not None:
        plan, line = kept
        return plan, estimator.estimate(plan), (line,)
    if left_open(seen.config):
        note("selecting the fastest configuration that fits")
    _, ranking = decide(estimator, seen.config)
    if ranking is None:
        plan = settle(seen.config)
        return plan, estimator.estimate(plan), ()
    plan = settle(opened(seen.config, ranking.names), ranking.selection)
    return plan, estimator.estimate(plan), (*describe_ranking(ranking),)


def _kept(seen: Look) -> tuple[RunPlan, str] | None:
    config, kept = seen.config, seen.kept
    if kept is None or any(kept.value(key) != config.value(key) for key in _SELECTED_FOR):
        return None
    if not (names := kept_names(config, kept)):
        return None
    selection, source = Selection.of(kept), seen.source or seen.run_dir / RUN_CONFIG
    line = f"{'auto':<8}{selection.text(names)}, as in {source}"
    return settle(opened(config, names), selection), line


def describe_ranking(ranking: Ranking) -> Iterator[str]:
    """Yield the selection, its reason, and the runner-up; or what is missing if nothing fits."""
    yield f"{'auto':<8}{ranking.summary}"
    if not ranking.ranked:
        return
    yield f"{'reason':<8}{_reason(ranking)}"
    if len(ranking.ranked) > 1 or ranking.defaults is None:
        yield f"{'next':<8}{_next(ranking)}"


def _reason(ranking: Ranking) -> str:
    first = ranking.ranked[0]
    fastest = min(ranking.ranked, key=lambda each: each.seconds)
    ranks = first.estimate.config.num_ranks
    among = f"of {ranking.count} combinations on {ranks} rank{'' if ranks == 1 else 's'}"
    reason = f"fastest {among} that fits"
    if fastest.seconds < first.seconds:
        alike = (x for x in ranking.ranked if x.seconds <= fastest.seconds * (1 + TIE))
        least = min(each.estimate.peak_reserved for each in alike)
        is_least = first.estimate.peak_reserved <= least
        what = "least memory" if is_least else "least recomputation"
        reason = f"{what} among the fastest {among} that fit"
    band = ranking.band_of(first)
    sources = ranking.whose if band is None else f"{ranking.whose}; {band}"
    seconds = f": {first.seconds:.3g} s/step predicted" if ranking.predicts else ""
    return f"{reason}{seconds} ({sources}), {_held(first)}"


def _next(ranking: Ranking) -> str:
    if len(ranking.ranked) == 1:
        return "nothing else fits"
    first, second = ranking.ranked[:2]
    time = f"{second.seconds:.3g} s/step predicted ({second.seconds / first.seconds - 1:+.1%}), "
    return (
        f"{second.selection.text(ranking.names)}: {time if ranking.predicts else ''}{_held(second)}"
    )


def _held(candidate: Candidate) -> str:
    estimate = candidate.estimate
    held, most = format_bytes(estimate.peak_reserved), format_bytes(max(0, estimate.available))
    return f"{held} of {most} per rank"
