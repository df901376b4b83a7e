"""How the ranks of a launch ended, and which of their failures the others follow from."""

import re
import signal
import socket
from dataclasses import dataclass
from typing import Any

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
            name = signal.Signals(-self.exit_code).name
            return f"killed by signal {-self.exit_code} ({name})"
        return " ".join(self.message.split())


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: no failure and no early stop means that all workers did their work."""

    failures: tuple[Failure, ...]
    stop_signal: int | None
    stopped_early: bool = False  # before there were workers
    silent_nodes: tuple[int, ...] = ()  # other launchers that did not say how theirs ended

    @property
    def cause(self) -> Failure | None:
        """The failure that the others follow from.

        A worker that dies breaks everybody's talks, and after a while the agent kills who is left.
        """
        first = min((each.timestamp for each in self.failures), default=0)
        early = [each for each in self.failures if each.timestamp <= first + _SAME_ACCIDENT_SECONDS]
        own = [each for each in early if each.message or each.exit_code != -signal.SIGTERM]
        killed = [each for each in own if each.was_killed]
        spoken = [each for each in own if not any(word in each.message for word in _BROKEN)]
        return next(iter([*killed, *spoken, *own, *early]), None)

    @property
    def silent_ranks(self) -> list[int]:
        """Where ranks waited in vain: those that failed and did not say that they waited."""
        return [each.rank for each in self.failures if not each.waited_in_vain]


def failure_of(rank: int, found: Any) -> Failure:
    """From what torch's agent says of a worker."""
    message = found.message
    if isinstance(message, dict):
        message = message.get("message", "")
    # torch puts the exception's class in front.
    text = re.sub(r"^\w+(Error|Exception): ", "", str(message))
    if _ENDED_BY_SIGNAL.fullmatch(text):
        text = ""
    if text.startswith("To enable traceback"):
        text = f"exit code {found.exitcode}, before it could say why"
    return Failure(rank, socket.gethostname(), found.exitcode, text, int(found.timestamp))
