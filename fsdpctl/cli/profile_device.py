"""`fsdpctl profile-device`."""

import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.config_args import ConfigArguments, RanksPerNode, Settings, normalized
from fsdpctl.cli.console import say
from fsdpctl.errors import FsdpctlError, InterruptError, StoppedError, UsageError

if TYPE_CHECKING:
    from fsdpctl.config.schema import Config

Out = Annotated[Path, typer.Argument(metavar="FILE", help="New JSON file to write the profile to.")]


def profile_device(out: Out, words: Settings = None, nproc_per_node: RanksPerNode = None) -> None:
    """Measure this machine for step-time predictions.

    Measures operators of real models, copies, the optimizer, collectives between the ranks, and
    their mutual slowdown. It takes two minutes, in which nothing else should run. Use the profile
    with `fsdpctl compare --simulate cluster.profile=FILE …`.
    """
    from fsdpctl.config.compose import compose_config
    from fsdpctl.predict.profile import read_profile
    from fsdpctl.resolve.machine import placed_here

    if out.exists():
        raise UsageError(f"{out}: already exists; pass another file")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: directory {out.absolute().parent} not found")
    asked = normalized(ConfigArguments(words), nproc_per_node)
    config = placed_here(compose_config(list(asked.settings or [])).config)
    with tempfile.TemporaryDirectory(prefix="fsdpctl-") as kept:
        measured = Path(kept) / "profile.json"
        _measure(config, measured)
        found = read_profile(measured)
        with out.open("xb") as file:
            file.write(measured.read_bytes())
    say(f"{out}: {found.device}, {found.ranks} ranks, {len(found.operators)} operators")


def _measure(config: "Config", file: Path) -> None:
    """Have all ranks of this machine measure it, and rank 0 write the profile."""
    from fsdpctl.launch.local import launch_workers
    from fsdpctl.tools.profile_worker import MODULE

    args = [str(config.launch.device), str(file)]
    outcome = launch_workers(MODULE, args, config.launch, logs=file.parent)
    if outcome.stop_signal == signal.SIGINT:
        raise InterruptError("interrupted before the measurement was complete")
    if outcome.stop_signal is not None:
        raise StoppedError("stopped before the measurement was complete")
    if outcome.cause is not None:
        raise FsdpctlError(f"rank {outcome.cause.rank} failed: {outcome.cause.cause}")
