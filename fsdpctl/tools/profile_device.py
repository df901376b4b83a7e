"""Measures this machine with all its ranks at once, into a file that time is foreseen with."""

import signal
import tempfile
from pathlib import Path

from fsdpctl.config.schema import Config
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError
from fsdpctl.launch.local import launch_workers
from fsdpctl.predict.profile import Profile, read_profile
from fsdpctl.tools.profile_worker import MODULE


def profile_device(config: Config) -> Profile:
    """What the device and the links between the ranks of `config` can do; takes two minutes.

    Args:
        config: placed on this machine.

    Raises:
        FsdpctlError: a rank failed.
        StoppedError, InterruptError: somebody asked to stop.
    """
    with tempfile.TemporaryDirectory(prefix="fsdpctl-") as kept:
        found = Path(kept) / "profile.json"
        words = [str(config.launch.device), str(found)]
        outcome = launch_workers(MODULE, words, config.launch, logs=Path(kept))
        if outcome.stop_signal == signal.SIGINT:
            raise InterruptError("interrupted before all was measured")
        if outcome.stop_signal is not None:
            raise StoppedError("stopped before all was measured")
        if outcome.cause is not None:
            raise FsdpctlError(f"rank {outcome.cause.rank} failed: {outcome.cause.cause}")
        return read_profile(found)
