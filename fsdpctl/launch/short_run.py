"""A short run on this machine, for measurements."""

from collections.abc import Mapping

from fsdpctl.config.schema import Settled
from fsdpctl.launch.workers import launch_workers
from fsdpctl.run.directory import Look, prepare_run_dir
from fsdpctl.run.heartbeat import lock_run_dir
from fsdpctl.training.worker import MEASURE


def run_briefly(
    seen: Look, config: Settled, settings: str, assets: Mapping[str, bytes]
) -> str | None:
    """Run the steps of a new run, without validation, checkpoints and samples.

    `config` is what was settled for the configuration of `seen`; `settings` and `assets` are
    written into the run directory. Returns the reason of a failure. StoppedError if a signal
    stopped it.
    """
    lock = lock_run_dir(seen.run_dir, lambda: None)
    try:
        prepare_run_dir(seen, config, [settings], assets)
        outcome = launch_workers([str(seen.run_dir), MEASURE], config.launch)
    finally:
        lock.release()
    outcome.raise_if_stopped("all variants had run")
    return None if outcome.cause is None else outcome.cause.cause
