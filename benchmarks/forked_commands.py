"""Runs fsdpctl's commands in forks of a process that has imported what they need.

A fork begins as `python -m fsdpctl` does, without the seconds that imports take. The ranks of a run
are forks too, in the environment that torchrun gives to its ranks.
"""

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

_IMPORTED = (
    "fsdpctl.cli.app", "fsdpctl.cli.estimate", "fsdpctl.cli.train", "fsdpctl.cli.checkpoint",
    "fsdpctl.start.begin", "fsdpctl.start.run", "fsdpctl.train.assemble", "fsdpctl.train.worker",
    "fsdpctl.tools.evaluate", "fsdpctl.checkpoint.consolidate", "torch._dynamo",
    "torch.distributed", "transformers.models.auto.modeling_auto", "transformers.modeling_utils",
)  # fmt: skip
_POLL = 0.02  # seconds


class Ended(NamedTuple):
    """How a command ended."""

    code: int  # its exit status; 124: it was killed after the limit
    output: str

    @property
    def problem(self) -> str:
        """The exit status and the last line; empty if the command succeeded."""
        if self.code == 0:
            return ""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("fsdpctl: ")]
        kind = "traceback" if "Traceback" in self.output else f"exit {self.code}"
        return f"{kind}: {[*lines, *own][-1] if lines else 'no output'}"[:300]


def import_all() -> None:
    """Import what the forks share."""
    for name in _IMPORTED:
        import_module(name)
    import_module("fsdpctl.config.compose").compose_config([])
    gc.collect()
    gc.freeze()


def call(function: Callable[[], None], folder: Path, limit: float) -> Ended:
    """Call a function in a fork, in `folder`; its exit status is 1 if it raises."""
    return _all_ended([_fork(function, folder, {})], limit)


def command(
    words: Sequence[str], folder: Path, limit: float, *, ranks: int = 0, **environment: str
) -> Ended:
    """Run a command in `folder`: in one process, or as each of `ranks` ranks."""

    def run() -> None:
        sys.argv = ["fsdpctl", *words]
        import_module("fsdpctl.__main__").main()

    if not ranks:
        return _all_ended([_fork(run, folder, environment)], limit)
    each = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), **environment,
    }  # fmt: skip
    forks = [
        _fork(run, folder, {**each, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    return _all_ended(forks, limit)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _fork(
    function: Callable[[], None], folder: Path, environment: Mapping[str, str]
) -> tuple[int, Path]:
    """Return the process, and the file of what it prints."""
    log = folder / f"output-{time.monotonic_ns()}"
    process = os.fork()
    if process:
        return process, log
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.update(environment)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _all_ended(forks: list[tuple[int, Path]], limit: float) -> Ended:
    """Wait for processes; one that fails, or the limit, ends the others a moment later."""
    until, codes = time.monotonic() + limit, dict[int, int]()
    while len(codes) < len(forks):
        for process, _ in forks:
            if process not in codes:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    codes[process] = os.waitstatus_to_exitcode(status)
                    if codes[process]:
                        until = min(until, time.monotonic() + 5)
        if time.monotonic() > until:
            for process, _ in forks:
                if process not in codes:
                    os.killpg(process, 9)
                    os.waitpid(process, 0)
                    codes[process] = 124
        time.sleep(_POLL)
    output = "\n".join(log.read_text(errors="replace") for _, log in forks if log.exists())
    return Ended(next((code for code in codes.values() if code), 0), output)
