"""A short run of a configuration, to measure it."""

import signal
from collections.abc import Mapping
from pathlib import Path

from fsdpctl.config.schema import Config
from fsdpctl.errors import InterruptError, StoppedError
from fsdpctl.launch.local import launch_workers
from fsdpctl.run.directory import LOGS, look, prepare_run_dir
from fsdpctl.run.lock import lock_run_dir
from fsdpctl.train.worker import MEASURE, MODULE


def short_run(config: Config, settings: str, assets: Mapping[str, bytes], what: str) -> str | None:
    """Run the steps of a settled configuration, without validation, checkpoints and samples.

    Args:
        config: Its run directory does not exist yet, but the parent of that does.
        settings: The settings that it was made of, for the run directory.
        assets: Files to keep next to its weights.
        what: What a stop request prevents, for the message.

    Returns:
        The reason of a failure; None if the run finished.

    Raises:
        StoppedError, InterruptError: If a stop was requested; the ranks have exited.
    """
    run_dir = Path(str(config.train.run_dir))
    lock = lock_run_dir(run_dir, lambda: None)
    prepare_run_dir(look(config, "auto"), config, [settings], assets)
    outcome = launch_workers(MODULE, [str(run_dir), MEASURE], config.launch, logs=run_dir / LOGS)
    lock.release()
    if outcome.stop_signal == signal.SIGINT:
        raise InterruptError(f"interrupted before {what}")
    if outcome.stop_signal is not None:
        raise StoppedError(f"stopped before {what}")
    return None if outcome.cause is None else outcome.cause.cause
