"""One short run of a configuration, for its figures."""

import signal
from collections.abc import Mapping
from pathlib import Path

from fsdpctl.config.schema import Config
from fsdpctl.errors import InterruptError, StoppedError
from fsdpctl.launch.local import launch_workers
from fsdpctl.run.directory import LOGS, plan_start, prepare_run_dir
from fsdpctl.run.lock import lock_run_dir
from fsdpctl.train.worker import MEASURE, MODULE


def short_run(config: Config, words: str, assets: Mapping[str, bytes], what: str) -> str | None:
    """Run a resolved configuration: steps, and neither validation, checkpoint nor sample.

    Args:
        config: with a run directory that is not there yet, in one that is.
        words: that it was made of, for the run directory.
        assets: files beside its weights.
        what: is not done where somebody asks to stop, for the message.

    Returns:
        Why it failed, if it did.

    Raises:
        StoppedError, InterruptError: somebody asked to stop; its ranks are gone.
    """
    run_dir = Path(str(config.train.run_dir))
    lock = lock_run_dir(run_dir, lambda: None)
    prepare_run_dir(plan_start(config, "auto"), [words], assets)
    outcome = launch_workers(MODULE, [str(run_dir), MEASURE], config.launch, logs=run_dir / LOGS)
    lock.release()
    if outcome.stop_signal == signal.SIGINT:
        raise InterruptError(f"interrupted before {what}")
    if outcome.stop_signal is not None:
        raise StoppedError(f"stopped before {what}")
    return None if outcome.cause is None else outcome.cause.cause
