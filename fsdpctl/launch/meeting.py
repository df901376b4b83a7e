"""How the launchers of several machines come together, and what they tell each other.

Node 0 decides and writes; the others see that they have the same program and the same directory,
and run their ranks. All of it is JSON in a store at node 0's address: nothing is unpickled.
"""

import hashlib
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # it does

import fsdpctl
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.launch.interface import own_address, split_endpoint
from fsdpctl.launch.outcome import Failure
from fsdpctl.launch.rendezvous import bound_store

_TOKEN = "meeting"  # a file of the run directory
_LAST_WORDS_SECONDS = 10.0
_LEFT = "the launchers of other nodes are gone, or the way to them"

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
    is_finished: bool = False  # the run is, so that there is nothing to do


@dataclass(frozen=True, slots=True)
class _Ready:
    refusal: str = ""


class Meeting:
    """The launchers of one run, of which this is one."""

    def __init__(self, launch: LaunchConfig) -> None:
        """Reach node 0, or be it.

        Raises:
            UsageError: the endpoint is none, not this machine's, or nobody is there in time.
        """
        assert launch.node_rank is not None
        assert launch.rdzv_endpoint is not None
        self.node, self.nodes = launch.node_rank, launch.nnodes
        address, self.port = split_endpoint(launch.rdzv_endpoint)
        self.address, self.interface = own_address(address, launch.interface)
        patience = timedelta(seconds=launch.timeout)
        if self.node == 0:
            self.store, _ = bound_store(address, self.port)
        else:
            try:
                self.store = TCPStore(address, self.port, is_master=False, timeout=patience)
            except Exception as error:  # torch's own classes differ by version
                raise UsageError(
                    f"launch.rdzv_endpoint={launch.rdzv_endpoint}: node 0 was not there within "
                    f"{launch.timeout:g} s: {error!s:.120}"
                ) from None
        self._words = PrefixStore("meeting", self.store)
        self._patience = patience
        self._has_told = False

    def invite(self, run_dir: Path, nproc_per_node: int) -> None:
        """As node 0, tell the others where, and wait until all are ready.

        Raises:
            UsageError: one of them cannot take part; then none does.
        """
        token = run_dir / _TOKEN
        plan = Plan(
            str(run_dir.absolute()), secrets.token_hex(16), _versions(), _code(),
            nproc_per_node,
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
        """As node 0, tell those who are there that nothing starts, unless they were invited."""
        if self._has_told:
            return
        self._tell("plan", Plan(refusal=reason, is_finished=is_finished))
        self._let_hear("ready")

    def accept(self, check: Callable[[Plan], str]) -> Plan:
        """As another node, hear what node 0 wants, and say whether this one can.

        Args:
            check: why it cannot, or "".

        Raises:
            UsageError: this node or another cannot, or node 0 does not want to.
        """
        plan = self._hear("plan", Plan)
        if plan.refusal:
            self._tell(f"ready/{self.node}", _Ready())
            if not plan.is_finished:
                raise UsageError(f"node 0: {plan.refusal}")
            return plan
        refusal = check(plan) or self._looks_elsewhere(plan)
        said = f"node {self.node} ({self.address}): {refusal}" if refusal else ""
        self._tell(f"ready/{self.node}", _Ready(said))
        answer = self._hear("go", _Ready)
        self._tell(f"heard/{self.node}", _Ready())
        if answer.refusal:
            raise UsageError(answer.refusal)
        return plan

    @staticmethod
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

    def share_failures(
        self, own: tuple[Failure, ...]
    ) -> tuple[tuple[Failure, ...], tuple[int, ...]]:
        """Those of all nodes, so that each knows the cause; and who did not say theirs in time."""
        found, silent = list(own), []
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        with _suppressing_losses():
            self._tell(f"ended/{self.node}", list(own))
        for node in (each for each in range(self.nodes) if each != self.node):
            left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
            silent.append(node)
            with _suppressing_losses():
                found += self._hear(f"ended/{node}", list[Failure], left)
                silent.pop()
        with _suppressing_losses():
            self._tell(f"gone/{self.node}", _Ready())
        if self.node == 0 and not silent:
            self._let_hear("gone")
        return tuple(found), tuple(silent)

    def _let_hear(self, answer: str) -> None:
        """Node 0's store goes with it: it leaves last, but does not wait for who is gone."""
        with _suppressing_losses():
            self._words.wait(self._of_others(answer), timedelta(seconds=2))

    def _of_others(self, word: str) -> list[str]:
        return [f"{word}/{node}" for node in range(1, self.nodes)]

    def _tell(self, key: str, value: object) -> None:
        self._words.set(key, msgspec.json.encode(value).decode())

    def _hear(self, key: str, kind: type[T], patience: timedelta | None = None) -> T:
        try:
            self._words.wait([key], patience or self._patience)
            return msgspec.json.decode(self._words.get(key), type=kind)
        except msgspec.MsgspecError as error:
            raise FsdpctlError(f"{key}: what another launcher said is damaged: {error}") from None
        except Exception:  # torch's own classes differ by version
            raise UsageError(f"waited in vain for {key}: {_LEFT}") from None


@contextmanager
def _suppressing_losses() -> Iterator[None]:
    try:
        yield
    except (FsdpctlError, RuntimeError):
        return


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
    packages = ", ".join(f"{name} {version(name)}" for name in ("fsdpctl", "torch"))
    return f"{packages}, Python {platform.python_version()}"


def _code() -> str:
    """A digest of the program's source."""
    root = Path(fsdpctl.__file__).parent
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]
