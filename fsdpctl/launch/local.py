"""Starts workers on this machine and waits for them, whatever happens to them or to us.

Note: signals. Workers have sessions of their own, so Ctrl-C reaches only this process. The first
request to stop is passed on to the workers, which finish their step, save and exit by themselves;
the agent is not told, because its own way of stopping loses their exit codes. A second Ctrl-C
kills them; other repeated requests change nothing.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from fsdpctl.config.placement import LaunchConfig

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_AGENT = "agent"  # where workers leave errors for torch's agent
_SAME_ACCIDENT_SECONDS = 5  # the agent's own SIGKILL comes half a minute after the first failure


@dataclass(frozen=True, slots=True)
class Failure:
    """How one worker ended."""

    rank: int
    host: str
    exit_code: int  # negative: the signal that killed it
    message: str
    timestamp: int  # seconds since the epoch; of the error, or of when its end was noticed

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it."""
        return self.exit_code < 0

    @property
    def cause(self) -> str:
        """Why it ended, in one line."""
        if self.was_killed:
            name = signal.Signals(-self.exit_code).name
            return f"killed by signal {-self.exit_code} ({name})"
        return " ".join(self.message.split())


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: no failure and no early stop means that all workers did their work."""

    failures: tuple[Failure, ...]
    stop_signal: int | None
    stopped_early: bool = False  # before there were workers

    @property
    def cause(self) -> Failure | None:
        """The failure that the others follow from.

        A worker that dies breaks everybody's talks, and after a while the agent kills who is left.
        """
        first = min((each.timestamp for each in self.failures), default=0)
        early = [each for each in self.failures if each.timestamp <= first + _SAME_ACCIDENT_SECONDS]
        own = [each for each in early if each.exit_code != -signal.SIGTERM]
        killed = [each for each in own if each.was_killed]
        spoken = [each for each in own if not _is_broken_talk(each.message)]
        return next(iter([*killed, *spoken, *own, *early]), None)


def _is_broken_talk(message: str) -> bool:
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")
    return any(word in message for word in words)


class _StoppedEarlyError(BaseException):
    """A request to stop came before there were workers to pass it on to."""


class _StopRequests:
    """Passes the first request to stop on to the workers; a second Ctrl-C kills them."""

    def __init__(self) -> None:
        self.first: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        again = self.first is not None
        if again and number != signal.SIGINT:
            return  # schedulers and closing terminals repeat themselves
        self.first = self.first or number
        if number == signal.SIGINT:  # written as it is: a progress bar may own the terminal
            said = b"killing\n" if again else b"stopping after this step; Ctrl-C again kills\n"
            os.write(sys.stderr.fileno(), b"\n" + said)
        children = psutil.Process().children()
        if not children:
            raise _StoppedEarlyError
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL if again else number)


@contextmanager
def _handling_signals() -> Iterator[_StopRequests]:
    requests = _StopRequests()
    heard = [each for each in _STOPPING if signal.getsignal(each) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, requests.handle) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch_workers(
    module: str, args: Sequence[str], launch: LaunchConfig, *, logs: Path
) -> Outcome:
    """Run `python -m module args…` on ranks of this machine until all have ended.

    Args:
        module: what to run; it finds its rank in torchrun's environment variables.
        args: its arguments.
        launch: resolved; how many, and how they keep memory.
        logs: an existing directory for the agent's own log.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    ranks = launch.nproc_per_node
    assert ranks is not None
    config = api.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="fsdpctl",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",  # not those that _StopRequests passes on
        logs_specs=DefaultLogsSpecs(log_dir=str(logs / _AGENT)),  # its own way leaves them in /tmp
    )
    start = api.elastic_launch(config, sys.executable)
    given = _environment(ranks, launch)
    with _logging_to(logs / "node-00000.log"), given, _handling_signals() as requests:
        try:
            start("-P", "-m", module, *args)  # -P: files in the current folder are no modules
            return Outcome((), requests.first)
        except _StoppedEarlyError:
            return Outcome((), requests.first, stopped_early=True)
        except ChildFailedError as error:
            failures = tuple(_failure(rank, each) for rank, each in sorted(error.failures.items()))
        finally:
            shutil.rmtree(logs / _AGENT, ignore_errors=True)
    return Outcome(failures, requests.first)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send what the agent logs to a file: what matters of it is said in one panel."""
    logger = logging.getLogger("torch.distributed")
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.propagate, logger.handlers
    logger.propagate, logger.handlers = False, [handler]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = before
        handler.close()


@contextmanager
def _environment(ranks: int, launch: LaunchConfig) -> Iterator[None]:
    """What workers inherit: a share of the cores, their launcher, gloo's interface, an allocator.

    What is set already stays as it is.
    """
    values = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "FSDPCTL_LAUNCHER": str(os.getpid()),
    }
    if launch.device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        grows = launch.allocator == "expandable"
        values["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{grows}"
    if Path("/sys/class/net/lo").exists():
        values["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve
    before = dict(os.environ)
    os.environ.update({name: before.get(name, value) for name, value in values.items()})
    os.environ["FSDPCTL_LAUNCHER"] = values["FSDPCTL_LAUNCHER"]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _failure(rank: int, found: Any) -> Failure:
    message = found.message
    if isinstance(message, dict):
        message = message.get("message", "")
    # torch puts the exception's class in front.
    text = re.sub(r"^\w+(Error|Exception): ", "", str(message))
    if text.startswith("To enable traceback"):
        text = f"exit code {found.exitcode}, before it could say why"
    return Failure(rank, socket.gethostname(), found.exitcode, text, int(found.timestamp))
