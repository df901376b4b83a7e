"""The number of processes of this machine that the kernel's out-of-memory killer has killed."""

import contextlib
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def kills_so_far(root: Path = _ROOT, cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Return the kills in this process's control group (version 1 or 2), else on the machine."""
    files = []
    with contextlib.suppress(OSError):
        for line in cgroup.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if number == "0":
                files += [root / inside / "memory.events", root / "memory.events"]
            elif "memory" in controllers.split(","):
                group = root / "memory"
                files += [group / inside / "memory.oom_control", group / "memory.oom_control"]
    files.append(Path("/proc/vmstat"))
    return next((count for file in files if (count := _count_in(file)) is not None), 0)


def _count_in(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.strip().isdecimal():
                return int(number)
    return None
