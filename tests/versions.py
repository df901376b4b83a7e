"""Tests versions of libraries: `python -m tests.versions lowest|newest|of-today [torch==X …]`.

`lowest` installs the lowest versions that pyproject.toml permits and `newest` the newest of the
index, in a new environment; `of-today` alternates by the day. Requirements that follow replace
those of pyproject.toml. If the index lacks a package, a line says so, and no test runs.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_EXTRAS = ("gguf", "parquet", "tensorboard", "dev")
_NOT_USED = ("mypy", "ruff", "types-")
_BOUND = re.compile(r">=([\w.]+).*")
# These tests train, resume, export and estimate by the command line, and use the libraries.
_RUNS = ["another_length_and_strategy_resume", "commands_on_its_checkpoint"]
_TESTS = [
    "tests/io", "tests/config", "tests/chats/test_files.py", "tests/data/test_tokenizer.py",
    "tests/checkpoint/test_gguf.py", "tests/checkpoint/test_gguf_header.py",
    "tests/training/test_trackers.py", "tests/commands/test_estimate.py",
]  # fmt: skip
_LACKS = ("No matching distribution", "Could not find a version", "NewConnectionError", "HTTPError")


def requirements(which: str, constraints: list[str]) -> list[str]:
    """Return what to install: the lowest versions that pyproject.toml permits, or its ranges."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {re.split(r"[<>=]", each)[0]: each for each in project["dependencies"]}
    for each in (each for extra in _EXTRAS for each in extras[extra]):
        wanted.setdefault(re.split(r"[<>=]", each)[0], each)
    wanted |= {each.split("==")[0]: each for each in constraints}
    needed = [each for each in wanted.values() if not each.startswith(_NOT_USED)]
    return [_BOUND.sub(r"==\1", each) for each in needed] if which == "lowest" else needed


def main(which: str, *constraint: str) -> int:
    """Install and test; return the exit code, 0 if the index lacks a package."""
    if which == "of-today":
        which = ("lowest", "newest")[datetime.date.today().toordinal() % 2]
    with tempfile.TemporaryDirectory() as folder:
        python = str(Path(folder, "bin", "python"))
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *requirements(which, [*constraint])]
        done = subprocess.run(install, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"versions: {which}: cannot be installed: {done.stderr.strip()[-600:]}")
            return 0 if any(each in done.stderr for each in _LACKS) else 1
        print(f"versions: {which}:", *listed(python), flush=True)
        # Older versions have warnings of their own.
        test = [python, "-m", "pytest", "-q", "-o", "filterwarnings=default", "-n", "2"]
        path = f"{folder}/bin:{os.environ['PATH']}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        runs = ["-m", "slow", "tests/commands/test_run.py", "-k", " or ".join(_RUNS)]
        codes = [
            subprocess.run([*test, *more], cwd=ROOT, env=env).returncode for more in (runs, _TESTS)
        ]
    return max(codes)


def listed(python: str) -> list[str]:
    """Return the installed packages with their versions."""
    freeze = [python, "-m", "pip", "list", "--format", "freeze"]
    return subprocess.run(freeze, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
