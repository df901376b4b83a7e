"""Checks before a run: optional packages, optimizer settings, and the command after a save."""

import shlex
import shutil
from importlib.util import find_spec

from fsdpctl.config.schema import Config, OptimizerConfig
from fsdpctl.errors import UsageError

_EXTRAS = ("tensorboard", "wandb")  # keys of `log`, packages, and extras of fsdpctl


def check_preflight(config: Config) -> None:
    """Check that the packages for logging are installed, and that `after_save` is a command.

    Raises:
        UsageError: If a package or the command is missing, or optimizer settings conflict.
    """
    for name in _EXTRAS:
        if getattr(config.log, name) and not _is_installed(name):
            raise UsageError(
                f"log.{name}=true: {name} is not installed; pip install 'fsdpctl[{name}]'"
            )
    check_optimizer(config)
    if config.checkpoint.after_save is not None:
        command_words(config.checkpoint.after_save)


def check_optimizer(config: Config) -> None:
    """Check that no setting is of an optimizer that is not used.

    Raises:
        UsageError: If one is, or if the learning rate has no default and is not set.
    """
    about, usual = config.optimizer, OptimizerConfig()
    other = "adamw" if about.name == "sgd" else "sgd"
    for name in ("beta1", "beta2", "eps") if other == "adamw" else ("momentum",):
        if (value := getattr(about, name)) != getattr(usual, name):
            raise UsageError(f"optimizer.{name}={value:g}: only valid with optimizer={other}")
    if about.name == "sgd" and about.lr is None:
        raise UsageError("optimizer.lr=auto: not supported with optimizer=sgd; set a number")


def _is_installed(package: str) -> bool:
    """Return whether a package has source: wandb leaves directories of its name behind."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def command_words(command: str) -> list[str]:
    """Split `checkpoint.after_save` as a shell does, without expansions.

    Raises:
        UsageError: If a quotation does not end, or the program is not found.
    """
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
