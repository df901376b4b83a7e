"""The limits of this process's control group (version 1 or 2)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def group_files(v2: str, v1: str, root: Path = ROOT, cgroup: Path = OWN) -> Iterator[Path]:
    """Yield a file of a controller by its name in either version.

    The innermost group comes first. Within a container, only the outermost may exist.
    """
    controller = v2.partition(".")[0]
    with contextlib.suppress(OSError):
        for line in os.fsdecode(cgroup.read_bytes()).splitlines():
            number, controllers, path = line.split(":", 2)
            top, name = root, v2
            if number != "0":
                top, name = root / controller, v1
                if controller not in controllers.split(","):
                    continue
            group = top / path.lstrip("/")
            while group != top:
                yield group / name
                group = group.parent
            yield top / name


def host_memory(root: Path = ROOT, cgroup: Path = OWN) -> int:
    """Return the bytes of this machine's memory that the processes of this group may use."""
    import psutil  # takes a moment

    limits = [int(psutil.virtual_memory().total)]
    for file in group_files("memory.max", "memory.limit_in_bytes", root, cgroup):
        with contextlib.suppress(OSError):
            text = file.read_text().strip()
            limits += [int(text)] if text.isdecimal() else []  # otherwise max
    return min(limits)
