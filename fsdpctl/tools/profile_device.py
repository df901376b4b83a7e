"""Measurement of this machine with all its ranks, for step-time predictions."""

import signal
import tempfile
from pathlib import Path

from fsdpctl.config.schema import Config
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError
from fsdpctl.launch.local import launch_workers
from fsdpctl.predict.profile import Profile, read_profile
from fsdpctl.tools.profile_worker import MODULE


def profile_device(config: Config) -> Profile:
    """Measure the device and the links between the ranks of `config`; takes two minutes.

    Args:
        config: Placed on this machine.

    Raises:
        FsdpctlError: If a rank fails.
        StoppedError, InterruptError: If a stop was requested.
    """
    with tempfile.TemporaryDirectory(prefix="fsdpctl-") as kept:
        found = Path(kept) / "profile.json"
        words = [str(config.launch.device), str(found)]
        outcome = launch_workers(MODULE, words, config.launch, logs=Path(kept))
        if outcome.stop_signal == signal.SIGINT:
            raise InterruptError("interrupted before the measurement was complete")
        if outcome.stop_signal is not None:
            raise StoppedError("stopped before the measurement was complete")
        if outcome.cause is not None:
            raise FsdpctlError(f"rank {outcome.cause.rank} failed: {outcome.cause.cause}")
        return read_profile(found)
