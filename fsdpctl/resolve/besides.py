"""What a run needs beside itself: packages of other tools, and the command that its user gives."""

import shlex
import shutil
from importlib.util import find_spec

from fsdpctl.config.schema import Config, OptimizerConfig
from fsdpctl.errors import UsageError

_EXTRAS = ("tensorboard", "wandb")  # keys of `log`, packages, and extras of ours


def check_besides(config: Config) -> None:
    """See that other tools that are to be told of the run are here, and a command can be run.

    Raises:
        UsageError: one is not installed, or the command is none.
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
    """See that nothing is said of one optimizer that another one has no use for.

    Raises:
        UsageError: it is, or a rate is missing that nobody can guess.
    """
    about, usual = config.optimizer, OptimizerConfig()
    other = "adamw" if about.name == "sgd" else "sgd"
    for name in ("beta1", "beta2", "eps") if other == "adamw" else ("momentum",):
        if (value := getattr(about, name)) != getattr(usual, name):
            raise UsageError(f"optimizer.{name}={value:g}: only with optimizer={other}")
    if about.name == "sgd" and about.lr is None:
        raise UsageError("optimizer.lr=auto: optimizer=sgd has no usual one; give a number")


def _is_installed(package: str) -> bool:
    """Folders of that name, as wandb leaves them behind, are none: they have no source."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def command_words(command: str) -> list[str]:
    """The words of `checkpoint.after_save`, split as a shell does; nothing is filled in.

    Raises:
        UsageError: a quotation does not end, or there is no such program.
    """
    where = f"checkpoint.after_save={command}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).lower()}") from None
    if not words:
        raise UsageError(f"{where}: no command")
    if shutil.which(words[0]) is None:
        raise UsageError(f"{where}: {words[0]} is no program that is found here")
    return words
