"""Begin a run: open it, lock its directory, decide what is `auto`, and write what workers read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.config.auto import Selection
from fsdpctl.config.compose import Composed
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.config.schema import Config
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.saved import write_estimate
from fsdpctl.resolve.launchers import Place
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.resolve.run import open_run, settle
from fsdpctl.run.assets import collect_assets
from fsdpctl.run.directory import Look, Standing, look, prepare_run_dir
from fsdpctl.run.heartbeat import RunLock, claimed
from fsdpctl.start.decide import decide
from fsdpctl.start.describe import describe_run
from fsdpctl.start.run import Talk


@dataclass(slots=True)
class Begun:
    """A run whose directory is locked and prepared. It holds no data: it may live for days."""

    run_dir: Path
    lock: RunLock
    base: Config  # as opened: settings that depend on the ranks are as requested
    selection: Selection | None  # of the settings that are `auto`
    config: Config  # settled for the ranks of the current round
    step: int  # of the checkpoint that the current round starts from

    @property
    def launch(self) -> LaunchConfig:
        """The ranks of the current round."""
        return self.config.launch


def begin(
    composed: Composed,
    settings: Sequence[str],
    resume: str,
    talk: Talk,
    where: Place | None = None,
    *,
    probes: bool = False,
) -> Begun | None:
    """Lock and prepare the run directory; return None if the run is finished.

    `settings` are recorded; `resume` is the value of `--resume`. With `probes`, `auto` may run
    candidates: only if this process starts all ranks.

    Raises:
        UsageError: If the run is invalid; nothing remains of a directory that was created here.
    """
    with talk.rows() as advance:
        opened = open_run(composed, where, advance)
    seen = look(opened.config, resume)
    if _is_finished(seen, talk):
        return None
    waiting = f"waiting for the workers of the last start of {seen.run_dir}"
    with claimed(seen.run_dir, lambda: talk.say(waiting)) as lock:
        seen = look(opened.config, resume, seen.run_dir)  # the run may have moved on, or finished
        if _is_finished(seen, talk):
            lock.release()
            return None
        decision = decide(opened, seen, talk.note, probes=probes)
        settled = settle(seen.config, decision.selection)
        estimator = Estimator()
        estimate = estimator.estimate(placed_on_cluster(settled.config))
        for line in (*decision.lines, *describe_run(opened, settled, seen, estimate)):
            talk.say(line)
        assets = collect_assets(settled.config, opened.data)
        prepare_run_dir(seen, settled.config, settings, assets)
        write_estimate(seen.run_dir, settled, opened.module, estimate, estimator)
    return Begun(seen.run_dir, lock, seen.config, decision.selection, settled.config, seen.step)


def _is_finished(seen: Look, talk: Talk) -> bool:
    if seen.standing is not Standing.FINISHED:
        return False
    talk.say(f"{seen.run_dir}: finished at step {seen.step}; nothing to do")
    talk.say("set a larger train.steps to continue, or pass --resume never to start a new run")
    return True
