"""The handshake of the launchers of several nodes, or of another launcher's ranks, before a run.

Node 0, or rank 0, sends an invitation. The other members check that they have the same program and
the same directory. All messages are JSON in a store at node 0's address; nothing is unpickled.
"""

import hashlib
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

import fsdpctl
from fsdpctl.comm.world import PrefixStore, Store
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io import files
from fsdpctl.io.files import os_errors_as, read_text_file
from fsdpctl.io.packages import versions
from fsdpctl.io.run_files import HANDSHAKE

_POLL_SECONDS = 0.1
# Keys of the store; READY, RECEIVED and JOINED are followed by `/INDEX`.
_INVITATION, _READY, _DECISION, _RECEIVED = "invitation", "ready", "decision", "received"
_JOINED, _WITHDRAWN = "joined", "withdrawn"

EXCHANGE_ERRORS = (FsdpctlError, RuntimeError)  # the other launchers do not respond
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Invitation:
    """The message of member 0 to the other members."""

    run_dir: str = ""
    token: str = ""  # contents of the file HANDSHAKE in the run directory
    software: str = ""  # versions of fsdpctl, torch, transformers and Python
    source_digest: str = ""  # digest of fsdpctl's source
    nproc_per_node: int = 0
    refusal: str = ""  # why the run does not start
    count: int = 0  # number of nodes or ranks
    is_finished: bool = False  # the run is finished, with nothing left to do


class Handshake:
    """One member, a node or a rank, of the handshake before a run."""

    def __init__(self, store: Store, index: int, count: int, *, noun: str, timeout: float) -> None:
        """Join as member `index` of `count` nodes or ranks (`noun`) in a store that all reach."""
        self.index, self.count, self.noun = index, count, noun
        self._store = PrefixStore("handshake", store)
        self._timeout = timeout
        self._has_invited = False
        if self._store.add(f"{_JOINED}/{index}", 1) > 1:
            raise UsageError(f"{noun} {index}: another {noun} has this number")

    def invite(self, run_dir: Path, nproc_per_node: int) -> None:
        """Send the run directory to the other members and wait until all are ready.

        Only member 0 calls this. UsageError if a member cannot take part; then no member starts.
        """
        token_file = run_dir / HANDSHAKE
        invitation = Invitation(
            str(run_dir.absolute()), secrets.token_hex(16), _software(), source_digest(),
            nproc_per_node, count=self.count,
        )  # fmt: skip
        with os_errors_as(token_file):
            files.write_atomic(token_file, invitation.token)
        self._send(_INVITATION, invitation)
        self._has_invited = True
        answers = [self._receive(key, str) for key in self._other_keys(_READY)]
        refusals = "; ".join(filter(None, answers))
        self._send(_DECISION, refusals)
        token_file.unlink(missing_ok=True)
        if refusals:
            self._wait_for_others(_RECEIVED)
            raise UsageError(refusals)

    def cancel(self, reason: str, *, is_finished: bool = False) -> None:
        """Tell the other members that nothing starts, unless invited. Only member 0 calls this."""
        if self._has_invited:
            return
        self._send(_INVITATION, Invitation(refusal=reason, is_finished=is_finished))
        self._wait_for_others(_READY)

    def accept(self, check: Callable[[Invitation], str]) -> Invitation:
        """Receive the invitation of member 0, and wait until all members are ready.

        `check` returns why this member cannot take part, or an empty string. UsageError if this or
        another member cannot, or if nothing starts.
        """
        invitation = self._receive(_INVITATION, Invitation)
        if invitation.refusal:
            self._send(f"{_READY}/{self.index}", "")
            if not invitation.is_finished:
                raise UsageError(f"{self.noun} 0: {invitation.refusal}")
            return invitation
        refusal = check(invitation) or _check_directory(invitation, self.noun)
        if invitation.count != self.count:
            refusal = f"started as one of {self.count} {self.noun}s, but {self.noun} 0 expects "
            refusal += str(invitation.count)
        location = f"{self.noun} {self.index} ({socket.gethostname()})"
        self._send(f"{_READY}/{self.index}", f"{location}: {refusal}" if refusal else "")
        refusals = self._receive(_DECISION, str)
        self._send(f"{_RECEIVED}/{self.index}", "")
        if refusals:
            raise UsageError(refusals)
        return invitation

    def withdraw(self, reason: str) -> None:
        """Tell the other members, before they start, that this member does not take part."""
        with suppress(*EXCHANGE_ERRORS):
            self._send(_WITHDRAWN, f"{self.noun} {self.index}: {reason}")

    def _wait_for_others(self, answer: str) -> None:
        """Let the other members read before this process, which serves the store, exits."""
        with suppress(*EXCHANGE_ERRORS):
            self._store.wait(self._other_keys(answer), timedelta(seconds=2))

    def _other_keys(self, key: str) -> list[str]:
        return [f"{key}/{index}" for index in range(1, self.count)]

    def _send(self, key: str, value: object) -> None:
        self._store.set(key, encode(value))

    def _receive(self, key: str, kind: type[T]) -> T:
        deadline = time.monotonic() + self._timeout
        sender = f"{self.noun} {key.partition('/')[2] or 0}"
        try:
            while not self._store.check([key]):  # torch logs each wait that times out
                if self._store.check([_WITHDRAWN]):
                    raise UsageError(decode(self._store.get(_WITHDRAWN), str))
                if time.monotonic() > deadline:
                    limit = f"within {self._timeout:g} s (launch.timeout)"
                    hint = "check that it was started and is reachable"
                    raise UsageError(f"{sender} did not answer {limit}; {hint}")
                time.sleep(_POLL_SECONDS)
            return decode(self._store.get(key), kind)
        except RuntimeError:
            raise UsageError(f"{sender}: exited or unreachable before the run started") from None


def encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def decode(text: bytes, kind: type[T]) -> T:
    """Return the value of another launcher's message; FsdpctlError if it is corrupted."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise FsdpctlError(f"message of another launcher: corrupted: {error}") from None


def _check_directory(invitation: Invitation, noun: str) -> str:
    with suppress(UsageError):
        if read_text_file(Path(invitation.run_dir) / HANDSHAKE) == invitation.token:
            return ""
    return (
        f"train.run_dir={invitation.run_dir}: files of {noun} 0 not found; all nodes need the "
        "same directory, on a file system that they share"
    )


def describe_difference(invitation: Invitation, launch: LaunchConfig, noun: str) -> str:
    """Return how this member's program or `launch` differs from member 0's, or an empty string."""
    if _software() != invitation.software:
        return f"{_software()} differs from {invitation.software} on {noun} 0"
    if source_digest() != invitation.source_digest:
        return f"fsdpctl's source differs from {noun} 0's; install the same source on all nodes"
    ranks, expected = launch.nproc_per_node, invitation.nproc_per_node
    if ranks != expected:
        return f"launch.nproc_per_node={ranks}: expected {expected}, as on {noun} 0"
    return ""


def _software() -> str:
    return ", ".join(" ".join(each) for each in versions().items())


def source_digest() -> str:
    root = Path(fsdpctl.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
