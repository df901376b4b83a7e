"""Runs a command as on other machines: `python -m tests.environments NAME -- COMMAND`.

An environment combines settings, and each setting is in at least two. `--of-today` selects one by
the day, and `--all` runs COMMAND in all of them and prints a table. If this machine does not permit
a setting, a line says so and COMMAND runs without it.
"""

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests import emulated

ROOT = Path(__file__).parent.parent
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "usual": (),
    "scalar": ("scalar", "one-core", "order"),
    "scalar-64": ("scalar", "64-cores", "path", "user"),
    "avx2": ("avx2", "home", "order", "threads"),
    "avx2-zone": ("avx2", "zone", "one-cpu"),
    "mkl": ("mkl", "user", "home", "threads"),
    "onednn": ("onednn", "path", "one-core"),
    "mkl-onednn": ("mkl", "onednn", "64-cores", "order"),
    "one-cpu": ("one-cpu", "path", "home"),
    "zone": ("zone", "threads", "user", "order"),
}
_LEVEL = "ATEN_CPU_CAPABILITY"
VARIABLES = {
    "scalar": {_LEVEL: "default"},
    "avx2": {_LEVEL: "avx2"},
    "mkl": {"MKL_CBWR": "COMPATIBLE"},
    "onednn": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "threads": {"OMP_NUM_THREADS": "3"},
    "zone": {"TZ": "Asia/Kolkata", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    "home": {"HOME": "/sys", "XDG_CACHE_HOME": ""},  # not writable for root either
    "order": {"PYTEST_ADDOPTS": f"--order {datetime.date.today().toordinal()}"},
}
_CORES = """import os
_sysconf = os.sysconf
os.cpu_count = os.process_cpu_count = lambda: 64
os.sched_getaffinity = lambda pid: set(range(64))
os.sysconf = lambda name: 64 if "NPROCESSORS" in str(name) else _sysconf(name)
"""
_USER = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]  # a number without a name
_CONFINED = ("one-core", "one-cpu", "user")
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "build", "dist")


def run(name: str, command: list[str]) -> tuple[int, str]:
    """Run `command` in an environment; return its exit code and the last line that it prints."""
    environ, folder, last = dict(os.environ), ROOT, ""
    environ["EMULATED_CUDA_LIBRARY"] = str(emulated.library())
    args = [os.path.abspath(shutil.which(command[0]) or command[0]), *command[1:]]
    with ExitStack() as stack:
        scratch_dir = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        scratch = Path(stack.enter_context(scratch_dir))
        for setting in ENVIRONMENTS[name]:
            environ.update(VARIABLES.get(setting, {}))
            if setting == "path":
                above = scratch / os.fsdecode("ein ü".encode())  # also if the locale is ASCII
                environ["TMPDIR"], folder = str(above), above / "checkout"
                shutil.copytree(ROOT, folder, ignore=_NOT_COPIED, symlinks=True)
            elif setting == "64-cores":
                (scratch / "sitecustomize.py").write_text(_CORES)
            elif setting in _CONFINED:
                args = _confined(setting, args, stack)
        paths = [str(scratch), str(folder), os.environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        options = f"environment {' '.join((name, *ENVIRONMENTS[name]))}"
        print(f"{_machine(environ.get(_LEVEL))}, {options}", flush=True)
        with subprocess.Popen(args, cwd=folder, env=environ, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for piece in iter(partial(os.read, process.stdout.fileno(), 1 << 16), b""):
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
                last = f"{last}{piece.decode('utf-8', 'replace')}"[-1000:]
        return process.returncode, last.strip().rpartition("\n")[2]


def _confined(setting: str, args: list[str], stack: ExitStack) -> list[str]:
    """Confine this process until `stack` closes; return arguments that start `args` confined."""
    try:
        if setting == "one-core":
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        elif setting == "one-cpu":
            _enter_group(stack)
        elif os.geteuid() == 0:
            subprocess.run([*_USER, "true"], check=True, capture_output=True)
            return [*_USER, *args]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{setting}: not permitted on this machine: {error}", flush=True)
    return args


def _enter_group(stack: ExitStack) -> None:
    """Enter a control group that has the time of one CPU."""
    root = Path("/sys/fs/cgroup")
    older = not (root / "cgroup.controllers").exists()
    above, limit = (root / "cpu", "cpu.cfs_quota_us") if older else (root, "cpu.max")
    group = above / f"fsdpctl-{os.getpid()}"
    group.mkdir()
    stack.callback(os.system, f"rmdir {group}")
    with open(group / limit, "r+") as file:  # FileNotFoundError without the controller
        file.write("100000" if older else "100000 100000")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    stack.callback((above / "cgroup.procs").write_text, str(os.getpid()))


def _machine(level: str | None) -> str:
    """Describe in a line what tests run on, with torch's level of instructions."""
    options = Path("/proc/cpuinfo")
    text = options.read_text(encoding="utf-8") if options.exists() else ""
    result = re.search("model name\\s*: (.*)", text)
    usual = "avx512" if " avx512vl" in text else "avx2" if " avx2" in text else "default"
    return (
        f"{result[1] if result else platform.machine()} ({level or usual}), "
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, torch {version('torch')}, "
        f"Python {platform.python_version()}"
    )


def main(args: list[str]) -> int:
    names, codes, table = list(ENVIRONMENTS), [0], []
    today = names[datetime.date.today().toordinal() % len(names)]
    which, dashes, command = [*args, "", ""][0], args[1:2], args[2:]
    selected = {"--all": names, "--of-today": [today]}.get(which, [which])
    if dashes != ["--"] or not command or not set(selected) <= set(names):
        print(f"expected --of-today, --all or one of {', '.join(names)}; then -- COMMAND")
        return 2
    for name in selected:
        began = time.monotonic()
        code, last = run(name, command)
        codes.append(code)
        table.append(f"{name:10} exit {code:3} {time.monotonic() - began:5.0f} s  {last}")
    if len(table) > 1:
        print("\n".join(table))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
