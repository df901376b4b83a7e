"""Options that the user adds with --config-dir: a directory per group, a file per option."""

from pathlib import Path

from fsdpctl.config.files import choices_below, choices_of
from fsdpctl.config.recipe import words_in
from fsdpctl.config.schema import GROUPS
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import read_yaml

_FREE_GROUPS = ("model", "prefetch", "precision", "cluster")  # whose options only set values


def check_config_dir(config_dir: Path | None) -> None:
    """Check that a directory adds options only to free groups, under new names.

    Raises:
        UsageError: If it doesn't, or if the directory doesn't exist.
    """
    if config_dir is None:
        return
    if not config_dir.is_dir():
        raise UsageError(f"--config-dir {config_dir}: no such directory")
    for group in GROUPS:
        if group not in _FREE_GROUPS and any(choices_below(config_dir / group)):
            raise UsageError(
                f"{config_dir / group}: the options of {group} are fixed; expected files for "
                f"{', '.join(_FREE_GROUPS)}"
            )
        ours = set(choices_of(group))
        for choice in sorted(ours.intersection(choices_below(config_dir / group))):
            raise UsageError(
                f"{config_dir / group / choice}.yaml: {group}={choice} already exists; rename "
                "the file"
            )


def own_choice(file: Path) -> list[tuple[str, str]]:
    """Read the settings of an option's file, which may have only comments.

    Raises:
        UsageError: If the file isn't a mapping of plain values.
    """
    content = read_yaml(file)
    words = words_in(file, content) if content else []
    for name, text in words:
        if "${" in text:
            raise UsageError(
                f"{file}: {name}: {text}: interpolation is not supported; expected a plain value"
            )
    return words
