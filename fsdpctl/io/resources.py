"""Resources of this host that its processes may use: cores, threads per rank, and memory."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdpctl.errors import UsageError

CPUS = Path("/sys/devices/system/cpu")
# Threads per rank, unless OMP_NUM_THREADS is set. More threads don't help: sleeping threads are
# woken one after another, and PyTorch divides operators of small models among few threads.
_MAX_THREADS = 16
CGROUP_ROOT, PROC_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowed_cpus() -> set[int]:
    """Return the hardware threads that the affinity mask allows."""
    is_linux = sys.platform == "linux"
    return os.sched_getaffinity(0) if is_linux else set(range(os.cpu_count() or 1))


def core_of(cpu: int) -> int:
    """Return the first hardware thread of the same core."""
    with suppress(OSError, ValueError):
        siblings = CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        return int(re.split("[,-]", siblings.read_text())[0])
    return cpu


def num_cores() -> int:
    """Return the cores that the affinity mask and the control group's limit allow, at least 1."""
    limits = [len({core_of(cpu) for cpu in allowed_cpus()})]
    for file in cgroup_files("cpu.max", "cpu.cfs_quota_us", CGROUP_ROOT, PROC_CGROUP):
        with suppress(OSError, ValueError):
            quota, *period = file.read_text().split()
            # In version 1, the period has its own file.
            period = period or [file.with_name("cpu.cfs_period_us").read_text()]
            limits += [int(quota) // max(1, int(period[0]))] if quota.isdecimal() else []
    return max(1, min(limits))


def has_cpu_affinity() -> bool:
    """Return whether another launcher has pinned this rank to a part of the cores."""
    job_cpus = os.environ.get("SLURM_CPUS_ON_NODE", "")
    total = int(job_cpus) if job_cpus.isdecimal() else os.cpu_count() or 1
    return "FSDPCTL_LAUNCHER" not in os.environ and len(allowed_cpus()) < total


def threads_per_rank(ranks: int) -> int:
    """Return the threads per rank of `ranks`; UsageError if OMP_NUM_THREADS is not a number."""
    if (text := os.environ.get("OMP_NUM_THREADS")) is None:
        return min(_MAX_THREADS, max(1, num_cores() // ranks))
    if not (match := re.fullmatch(r"\s*([1-9]\d{0,3})\s*(,[\d, ]*)?", text, re.ASCII)):
        raise UsageError(f"OMP_NUM_THREADS={text:.40}: expected a number of threads, 1 to 9999")
    return int(match[1])


def cgroup_files(v2: str, v1: str, root: Path, cgroup: Path) -> Iterator[Path]:
    """Yield the paths of a controller's file in this process's control groups, innermost first.

    `v2` and `v1` are its names in the two versions of control groups. Within a container, only the
    outermost path may exist.
    """
    controller = v2.partition(".")[0]
    with suppress(OSError):
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


def host_memory(root: Path = CGROUP_ROOT, cgroup: Path = PROC_CGROUP) -> int:
    """Return the bytes of host memory that the control groups of this process allow."""
    import psutil  # takes a moment

    limits = [int(psutil.virtual_memory().total)]
    for file in cgroup_files("memory.max", "memory.limit_in_bytes", root, cgroup):
        with suppress(OSError):
            text = file.read_text().strip()
            limits += [int(text)] if text.isdecimal() else []  # otherwise max
    return min(limits)


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector in the block. One collection of torch's objects takes 0.1 s.

    In the block, a tensor is freed with its last reference and at no other time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
