"""Notes on files of conversations: their formats, and the keys that are followed or ignored."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.data.chats.formats import TOOLS
from fsdpctl.data.chats.template import ChatTemplate
from fsdpctl.data.chats.values import shown
from fsdpctl.errors import first_of

MOST_FILES, _MOST_KEYS = 8, 12  # that are named


def notes_on_files(
    files: Sequence[Path], facts: Mapping[str, Any], template: ChatTemplate | None
) -> list[str]:
    """Return the format of each file, and the keys that neither fsdpctl nor the template uses."""
    written = "" if template is None else template.text + template.tool_text
    words = set(re.findall(r"\w+", written))
    known = zip(files, facts["formats"], facts["keys"], strict=True)
    lines, rest = [], Counter[str]()
    for number, (file, name, counts) in enumerate(known):
        ignored, followed = dict(counts["ignored"]), dict(counts["followed"])
        for key in counts["ignored"]:
            if "[]" in key and key.rpartition(".")[2] in words:
                del ignored[key]
        for key in {*TOOLS} & followed.keys() if "tools" not in words else ():
            ignored[key] = followed.pop(key)
        if number >= MOST_FILES:
            rest.update(ignored)
            continue
        more = f", with {listed(followed)}" if followed else ""
        lines.append(f"{file}: {name}{more}")
        lines += [f"{file}: ignored: {listed(ignored)}"] if ignored else []
    if len(files) > MOST_FILES:
        text = counted(len(files) - MOST_FILES, "more file")
        lines.append(f"{text}, ignored: {listed(rest)}" if rest else text)
    return lines


def listed(counts: Mapping[str, int]) -> str:
    """List keys with the number of their rows, most frequent first."""
    names = [
        f"{shown(key)} ({counted(count, 'row')})"
        for key, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    ]
    return first_of(names, _MOST_KEYS)


def counted(count: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
