"""The page of all settings, from what `fsdpctl list --json` prints."""

import json
from typing import Any

from typer.testing import CliRunner

from docs.measured import table_of
from fsdpctl.commands.app import app
from fsdpctl.config.options import first_comment
from fsdpctl.io.packages import package_folder


def settings_tables() -> str:
    """Return a section for each group: its options and its keys, with an anchor each."""
    groups = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    groups = [each for each in groups if each["name"] != "recipe"]
    links = " · ".join(f"[`{each['name']}`](#{each['name']})" for each in groups)
    return "\n\n".join([links, *map(_section, groups)])


def _section(group: dict[str, Any]) -> str:
    name, parts = group["name"], [f"## {group['name']}"]
    if group["choices"]:
        folder = package_folder("conf") / name
        rows = (
            f"`{name}={each}`{' (default)' * (each == group['default'])} | "
            f"{_cell(first_comment(folder / f'{each}.yaml'))}"
            for each in group["choices"]
        )
        parts.append(table_of("option | description", rows, align="---"))
    if group["keys"]:
        rows = (
            f'<a id="{key["name"]}"></a>`{key["name"]}` | {_cell(key["default"])} | '
            f"{_cell(key['allowed'])} | {_cell(key['meaning'])}"
            for key in group["keys"]
        )
        parts.append(table_of("key | default | allowed | meaning", rows, align="---"))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    for character in "|<*":
        text = text.replace(character, f"\\{character}")
    return text
