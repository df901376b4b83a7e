"""What a run needs beside itself: packages of other tools, and the command that its user gives."""

import shlex
import shutil
from importlib.util import find_spec

from fsdpctl.config.schema import Config
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
    if config.checkpoint.after_save is not None:
        command_words(config.checkpoint.after_save)


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
