"""Choices of one's own: the files in --config-dir, a folder per group."""

from pathlib import Path

from fsdpctl.config.files import choices_below, choices_of
from fsdpctl.config.recipe import words_in
from fsdpctl.config.schema import GROUPS
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_yaml

_FREE_GROUPS = ("model", "prefetch", "precision", "cluster")  # whose choices are only values


def check_config_dir(config_dir: Path | None) -> None:
    """See that it adds choices to groups that are free to have more, under names of their own.

    Raises:
        UsageError: it does not, or there is no such directory.
    """
    if config_dir is None:
        return
    if not config_dir.is_dir():
        raise UsageError(f"--config-dir {config_dir}: no such directory")
    for group in GROUPS:
        if group not in _FREE_GROUPS and any(choices_below(config_dir / group)):
            raise UsageError(
                f"{config_dir / group}: the choices of {group} are fixed; files can add to "
                f"{', '.join(_FREE_GROUPS)}"
            )
        ours = set(choices_of(group))
        for choice in sorted(ours.intersection(choices_below(config_dir / group))):
            raise UsageError(
                f"{config_dir / group / choice}.yaml: {group}={choice} exists already; "
                "name yours otherwise"
            )


def own_choice(file: Path) -> list[tuple[str, str]]:
    """The words and values in a file of a choice; one of comments alone has none.

    Raises:
        UsageError: it is no mapping of plain values.
    """
    content = read_yaml(file)
    words = words_in(file, content) if content else []
    for name, text in words:
        if "${" in text:
            raise UsageError(f"{file}: {name}: {text}: values are plain; nothing is filled in")
    return words
