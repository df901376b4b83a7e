"""How launchers of several machines, or ranks of another launcher, come together before a run.

The first of them decides and writes; the others see that they have the same program and the same
directory. All of it is JSON in a store at the first one's address: nothing is unpickled.
"""

import hashlib
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec

import fsdpctl
from fsdpctl.comm.stores import DistStoreError, PrefixStore, Store
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError

_TOKEN = "meeting"  # a file of the run directory
_LOOKS_EVERY = timedelta(seconds=1)  # whether somebody has left
_LEFT = "others did not come, are gone, or cannot be reached"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """What node 0 tells the others."""

    run_dir: str = ""
    token: str = ""  # what a file in it says
    versions: str = ""  # of what trains: fsdpctl, torch, Python
    code: str = ""  # a digest of the program's source
    nproc_per_node: int = 0
    refusal: str = ""  # why it does not start
    members: int = 0  # nodes or ranks
    is_finished: bool = False  # the run is, so that there is nothing to do


@dataclass(frozen=True, slots=True)
class _Ready:
    refusal: str = ""


class Meeting:
    """The launchers of one run, or its ranks, of which this is one."""

    def __init__(self, store: Store, own: int, count: int, *, noun: str, patience: float) -> None:
        """As number `own` of `count` nodes or ranks (`noun`), in a store that all of them reach.

        Raises:
            UsageError: there is another one of that number.
        """
        self.own, self.count, self.noun = own, count, noun
        self._words = PrefixStore("meeting", store)
        self._patience = patience
        self._has_told = False
        if self._words.add(f"here/{own}", 1) > 1:
            raise UsageError(f"{noun} {own}: there is another one of this number")

    def invite(self, run_dir: Path, nproc_per_node: int) -> None:
        """As the first, tell the others where, and wait until all are ready.

        Raises:
            UsageError: one of them cannot take part; then none does.
        """
        token = run_dir / _TOKEN
        plan = Plan(
            str(run_dir.absolute()), secrets.token_hex(16), _versions(), _code(),
            nproc_per_node, members=self.count,
        )  # fmt: skip
        token.write_text(plan.token)
        self._tell("plan", plan)
        self._has_told = True
        answers = [self._hear(key, _Ready) for key in self._of_others("ready")]
        refusals = [each.refusal for each in answers if each.refusal]
        self._tell("go", _Ready("; ".join(refusals)))
        token.unlink(missing_ok=True)
        if refusals:
            self._let_hear("heard")
            raise UsageError("; ".join(refusals))

    def call_off(self, reason: str, *, is_finished: bool = False) -> None:
        """As the first, tell those who are there that nothing starts, unless they were invited."""
        if self._has_told:
            return
        self._tell("plan", Plan(refusal=reason, is_finished=is_finished))
        self._let_hear("ready")

    def accept(self, check: Callable[[Plan], str]) -> Plan:
        """As another, hear what the first wants, and say whether this one can.

        Args:
            check: why it cannot, or "".

        Raises:
            UsageError: this one or another cannot, or the first does not want to.
        """
        plan = self._hear("plan", Plan)
        if plan.refusal:
            self._tell(f"ready/{self.own}", _Ready())
            if not plan.is_finished:
                raise UsageError(f"{self.noun} 0: {plan.refusal}")
            return plan
        refusal = self._counts_otherwise(plan) or check(plan) or _looks_elsewhere(plan)
        where = f"{self.noun} {self.own} ({socket.gethostname()})"
        self._tell(f"ready/{self.own}", _Ready(f"{where}: {refusal}" if refusal else ""))
        answer = self._hear("go", _Ready)
        self._tell(f"heard/{self.own}", _Ready())
        if answer.refusal:
            raise UsageError(answer.refusal)
        return plan

    def _counts_otherwise(self, plan: Plan) -> str:
        if plan.members == self.count:
            return ""
        return f"takes part as one of {self.count} {self.noun}s, and {plan.members} are invited"

    def leave(self, reason: str) -> None:
        """Tell the others that this one does not take part after all, before they began."""
        with suppressing_losses():
            self._tell("left", _Ready(f"{self.noun} {self.own}: {reason}"))

    def _let_hear(self, answer: str) -> None:
        """The store goes with the first: it leaves last, but does not wait for who is gone."""
        with suppressing_losses():
            self._words.wait(self._of_others(answer), timedelta(seconds=2))

    def _of_others(self, word: str) -> list[str]:
        return [f"{word}/{each}" for each in range(1, self.count)]

    def _tell(self, key: str, value: object) -> None:
        self._words.set(key, encode(value))

    def _hear(self, key: str, kind: type[T]) -> T:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._words.wait([key], _LOOKS_EVERY)
                return decode(self._words.get(key), kind)
            except DistStoreError:
                self._check_left(key, is_late=time.monotonic() > deadline)
            except RuntimeError:
                raise UsageError(f"waited in vain for {key}: {_LEFT}") from None

    def _check_left(self, key: str, *, is_late: bool) -> None:
        if self._words.check(["left"]):
            raise UsageError(decode(self._words.get("left"), _Ready).refusal)
        if is_late:
            raise UsageError(f"waited {self._patience:g} s in vain for {key}: {_LEFT}")


def encode(value: object) -> str:
    """As what others decode."""
    return msgspec.json.encode(value).decode()


def decode(text: bytes, kind: type[T]) -> T:
    """What another one has encoded.

    Raises:
        FsdpctlError: it is of another form.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise FsdpctlError(f"what another launcher said is damaged: {error}") from None


@contextmanager
def suppressing_losses() -> Iterator[None]:
    """Go on where the others, or the way to them, are gone."""
    try:
        yield
    except (FsdpctlError, RuntimeError):
        return


def _looks_elsewhere(plan: Plan) -> str:
    token = Path(plan.run_dir) / _TOKEN
    try:
        if token.read_text() == plan.token:
            return ""
    except OSError:
        pass
    return (
        f"train.run_dir={plan.run_dir}: what node 0 wrote there is not seen here; every node "
        "needs the same directory, on a file system that all of them mount"
    )


def difference(plan: Plan, launch: LaunchConfig) -> str:
    """In what this node's program or launch is not node 0's, in words; "" if in nothing."""
    if _versions() != plan.versions:
        return f"{_versions()}, and {plan.versions} on node 0"
    if _code() != plan.code:
        return "its source of fsdpctl differs from node 0's: install the same on every node"
    if launch.nproc_per_node != plan.nproc_per_node:
        return (
            f"launch.nproc_per_node={launch.nproc_per_node}, and {plan.nproc_per_node} on node 0: "
            "every node needs as many ranks"
        )
    return ""


def _versions() -> str:
    python = platform.python_version()
    return f"fsdpctl {fsdpctl.__version__}, torch {version('torch')}, Python {python}"


def _code() -> str:
    """A digest of the program's source."""
    root = Path(fsdpctl.__file__).parent
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]
