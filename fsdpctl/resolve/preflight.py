"""Checks of a run that are not of its settings: packages, the command after a save, parameters."""

import shlex
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

from fsdpctl.config.placement import OURS
from fsdpctl.config.schema import Config
from fsdpctl.config.sources import is_remote
from fsdpctl.errors import UsageError
from fsdpctl.plan.optimizers import MUON, is_muons
from fsdpctl.plan.strategy import FSDPCTL
from fsdpctl.plan.units import UnitSpec

_EXTRAS = ("tensorboard", "wandb")  # keys of `log`, packages, and extras of fsdpctl


def check_preflight(config: Config) -> None:
    """Check what estimates have no need of: packages for logging, the command of `after_save`."""
    if (program := config.engine.program) != OURS:
        raise UsageError(f"engine.program={program}: for estimates only; expected {OURS}")
    for name in _EXTRAS:
        if getattr(config.log, name) and not _is_installed(name):
            raise UsageError(f"log.{name}=true: {name} is not installed; pip install {name}")
    if config.checkpoint.after_save is not None:
        command_words(config.checkpoint.after_save)
    remote = config.checkpoint.remote
    if remote is not None and not is_remote(remote, f"checkpoint.remote={remote}"):
        raise UsageError(
            f"checkpoint.remote={remote}: expected a directory in an object store, such as "
            "s3://BUCKET/runs"
        )


def _is_installed(package: str) -> bool:
    """Return whether a package has source: wandb leaves directories of its name behind."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def command_words(command: str) -> list[str]:
    """Split `checkpoint.after_save` as a shell does, without expansions, and find the program."""
    where = f"checkpoint.after_save={command}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).lower()}") from None
    if not words:
        raise UsageError(f"{where}: expected a command")
    if shutil.which(words[0]) is None:
        raise UsageError(f"{where}: program {words[0]} not found")
    return words


def check_trained(config: Config, units: Sequence[UnitSpec]) -> None:
    """Check that the optimizer and the engine support the parameters of a model."""
    params = [param for unit in units for param in unit.params]
    config.strategy.on_host.check_rests(trains_all=all(param.trainable for param in params))
    if config.optimizer.name == MUON and not any(map(is_muons, params)):
        raise UsageError(
            "optimizer=muon: the model has no trained matrix in a block; use optimizer=adamw"
        )
    if config.engine.name != FSDPCTL and not all(param.trainable for param in params):
        raise UsageError(
            f"engine={config.engine.name}: trains all parameters; model.lora and model.trainable "
            f"require engine={FSDPCTL}"
        )
