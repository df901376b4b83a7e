"""How the ranks of a launch ended, and which of their failures the others follow from."""

import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpctl.errors import StoppedError
from fsdpctl.launch.stopping import STOPPING

_SAVED = StoppedError.exit_code
_SAME_ACCIDENT_SECONDS = 5  # the agent's own SIGKILL comes half a minute after the first failure
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")
_ENDED_BY_SIGNAL = re.compile(r"Signal \d+ \(\w+\) received by PID \d+")  # the agent's own words
_IN_VAIN = re.compile(r"timed? ?out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one worker ended."""

    rank: int
    host: str
    exit_code: int  # negative: the signal that killed it
    message: str  # empty if it left none
    timestamp: int  # seconds since the epoch; of the error, or of when its end was noticed
    out_of_memory: bool = False  # the kernel killed it, for want of memory

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, before it could say what happened to it."""
        return self.exit_code < 0 and not self.message

    @property
    def waited_in_vain(self) -> bool:
        """Whether it gave up waiting for other ranks, and so may not be to blame."""
        return not self.was_killed and _IN_VAIN.search(self.message) is not None

    @property
    def cause(self) -> str:
        """Why it ended, in one line."""
        if self.was_killed:
            if self.out_of_memory:
                return "killed by the kernel: this machine, or what it may use, is out of memory"
            name = signal.Signals(-self.exit_code).name
            return f"killed by signal {-self.exit_code} ({name})"
        return " ".join(self.message.split())


@dataclass(frozen=True, slots=True)
class Ended:
    """How the workers of one launcher ended, as it tells the others."""

    failures: tuple[Failure, ...] = ()
    stop_signal: int | None = None  # that the launcher was asked to stop with
    stopped_early: bool = False  # before there were workers
    hang: str = ""  # who stood still, in a line
    failed_at: float | None = None  # when the first worker was missed; seconds since the epoch
    were_ended: bool = False  # the workers, only because those of another node had failed

    @property
    def has_failed(self) -> bool:
        """Whether others cannot go on; those that have saved end by themselves."""
        return self.stopped_early or any(each.exit_code != _SAVED for each in self.failures)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: no failure and no early stop means that all workers did their work."""

    failures: tuple[Failure, ...]
    stop_signal: int | None  # that this launcher was asked to stop with
    was_asked: bool = False  # a launcher was, this or another
    stopped_early: bool = False  # before there were workers
    silent_nodes: tuple[int, ...] = ()  # other launchers that did not say how theirs ended
    hang: str = ""  # who stood still, in a line
    failed_at: float | None = None  # seconds since the epoch; by this launcher's clock
    were_ended: bool = False  # this launcher's, because those of another node had failed

    @classmethod
    def of(cls, ended: Mapping[int, Ended], own: int, silent: tuple[int, ...] = ()) -> "Outcome":
        """From what the launchers of all nodes say, of which this is number `own`."""
        return cls(
            tuple(failure for node in sorted(ended) for failure in ended[node].failures),
            ended[own].stop_signal,
            any(each.stop_signal is not None for each in ended.values()),
            any(each.stopped_early for each in ended.values()),
            silent,
            next((each.hang for each in ended.values() if each.hang), ""),
            ended[own].failed_at,
            ended[own].were_ended,
        )

    @property
    def has_failed(self) -> bool:
        """Whether not all workers did their work."""
        return bool(self.failures or self.hang or self.were_ended)

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        if self.hang or self.cause is None:
            return self.hang or f"nothing was heard of node {listed(self.silent_nodes)}"
        return f"rank {self.cause.rank} on {self.cause.host}: {self.cause.cause}"

    @property
    def was_stopped_at_start(self) -> bool:
        """Whether ranks were asked to stop, and had nothing to save yet."""
        at_once = any(each.was_killed and -each.exit_code in STOPPING for each in self.failures)
        saved = any(each.exit_code == _SAVED for each in self.failures)
        return self.stopped_early or (self.was_asked and at_once and not saved)

    @property
    def cause(self) -> Failure | None:
        """The failure that the others follow from.

        A worker that dies breaks everybody's talks, and after a while the agent kills who is left.
        """
        first = dict[str, int]()  # by host: clocks of several need not agree
        for each in self.failures:
            first[each.host] = min(each.timestamp, first.get(each.host, each.timestamp))
        early = [
            each
            for each in self.failures
            if each.timestamp <= first[each.host] + _SAME_ACCIDENT_SECONDS
        ]
        own = [each for each in early if each.message or each.exit_code != -signal.SIGTERM]
        killed = [each for each in own if each.was_killed]
        spoken = [each for each in own if not any(word in each.message for word in _BROKEN)]
        return next(iter([*killed, *spoken, *own, *early]), None)

    @property
    def silent_ranks(self) -> list[int]:
        """Where ranks waited in vain: those that failed and did not say that they waited."""
        return [each.rank for each in self.failures if not each.waited_in_vain]


def listed(numbers: Sequence[int]) -> str:
    """In words."""
    return ", ".join(map(str, numbers))


def failure_of(rank: int, found: Any, *, short_of_memory: bool = False) -> Failure:
    """From what torch's agent says of a worker, and whether the kernel had to kill meanwhile."""
    message = found.message
    if isinstance(message, dict):
        message = message.get("message", "")
    # torch puts the exception's class in front.
    text = re.sub(r"^\w+(Error|Exception): ", "", str(message))
    if _ENDED_BY_SIGNAL.fullmatch(text):
        text = ""
    if text.startswith("To enable traceback"):
        text = f"exit code {found.exitcode}, before it could say why"
    code = found.exitcode
    starved = short_of_memory and code == -signal.SIGKILL
    return Failure(rank, socket.gethostname(), code, text, int(found.timestamp), starved)
