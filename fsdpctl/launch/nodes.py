"""The launchers of several machines, while their ranks train: who is alive, and how ranks ended."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from fsdpctl.comm.stores import PrefixStore, Store, TCPStore
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.launch.hang import RankState
from fsdpctl.launch.interface import own_address, split_endpoint
from fsdpctl.launch.meeting import Meeting, decode, encode, suppressing_losses
from fsdpctl.launch.outcome import Ended, Outcome
from fsdpctl.launch.rendezvous import bound_store

_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 30.0  # without a beat: a cable that was pulled for less does no harm
_STATES_SECONDS = 5.0  # in which others say where their ranks stand
_LEAVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Round:
    """Who takes part when ranks are started again: none where the run is over."""

    nodes: list[int] = field(default_factory=list)
    nproc_per_node: int = 0


class Nodes:
    """This launcher, and how it reaches the others."""

    def __init__(self, launch: LaunchConfig) -> None:
        """Reach node 0, or be it.

        Raises:
            UsageError: the endpoint is none, not this machine's, or nobody is there in time.
        """
        assert launch.node_rank is not None
        assert launch.rdzv_endpoint is not None
        self.own = launch.node_rank
        self.members: Sequence[int] = range(launch.nnodes)
        self._timeout = launch.timeout
        address, self.port = split_endpoint(launch.rdzv_endpoint)
        self.endpoint_address = address
        self.address, self.interface = own_address(address, launch.interface)
        self.store: TCPStore = reached_store(
            address, self.port, launch.timeout, is_first=self.own == 0
        )
        self.meeting = Meeting(
            self.store, self.own, launch.nnodes, noun="node", patience=launch.timeout
        )
        # Connections of their own, for the threads that use them: who waits in one holds it.
        self._words, self._watched, beats = (
            PrefixStore("nodes", TCPStore(address, self.port, is_master=False)) for _ in range(3)
        )
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(beats,), daemon=True).start()

    def place(self) -> tuple[int, int]:
        """Which one this is among those that take part, and how many they are."""
        return list(self.members).index(self.own), len(self.members)

    def store_of(self, number: int) -> Store:
        """Where the ranks of the round `number` meet: nothing of the last one lies there."""
        return PrefixStore(f"round-{number}", self.store)

    def has_failed_elsewhere(self, number: int) -> bool:
        """Whether ranks of another node have failed in this round; True if nobody can say."""
        try:
            return self._watched.check([f"failed/{number}"])
        except RuntimeError:
            return True

    def hangs_elsewhere(self, number: int) -> bool:
        """Whether the launcher of another node says that ranks stand still in this round."""
        try:
            return self._watched.check([f"hang/{number}"])
        except RuntimeError:
            return False

    def share_states(self, number: int, own: list[RankState]) -> list[RankState]:
        """Where the ranks of all nodes stand that say so in time."""
        found = list(own)
        with suppressing_losses():
            self._watched.set(f"states/{number}/{self.own}", encode(own))
            self._watched.set(f"hang/{number}", "")
        until = time.monotonic() + _STATES_SECONDS
        for node in (each for each in self.members if each != self.own):
            with suppressing_losses():
                key, left = f"states/{number}/{node}", max(0.1, until - time.monotonic())
                self._watched.wait([key], timedelta(seconds=left))
                found += decode(self._watched.get(key), list[RankState])
        return found

    def share(self, number: int, own: Ended) -> Outcome:
        """How the ranks of all nodes ended in this round, as far as their launchers live."""
        with suppressing_losses():
            if own.has_failed:
                self._words.set(f"failed/{number}", "")
            self._words.set(f"ended/{number}/{self.own}", encode(own))
        found, silent = {self.own: own}, []
        for node in self.members:
            if node not in found:
                heard = self._ended_there(number, node)
                if heard is None:
                    silent.append(node)
                else:
                    found[node] = heard
        return Outcome.of(found, self.own, tuple(silent))

    def _ended_there(self, number: int, node: int) -> Ended | None:
        """What its launcher says; None where that has gone silent."""
        key, beat, since = f"ended/{number}/{node}", b"", time.monotonic()
        while time.monotonic() - since < _SILENCE_SECONDS:
            try:
                if self._words.check([key]):
                    return decode(self._words.get(key), Ended)
                if self._words.check([f"gone/{node}"]):
                    return None
                now = (
                    self._words.get(f"beat/{node}") if self._words.check([f"beat/{node}"]) else b""
                )
            except (FsdpctlError, RuntimeError):
                return None
            if now != beat:
                beat, since = now, time.monotonic()
            time.sleep(0.1)
        return None

    def order(self, number: int, following: Round) -> None:
        """As node 0, say how it goes on after the round `number`."""
        with suppressing_losses():
            self._words.set(f"order/{number}", encode(following))
        if following.nodes:
            self.members = following.nodes

    def await_order(self, number: int) -> Round:
        """As another node, hear it; nobody takes part where node 0 is gone."""
        since = time.monotonic()
        try:
            while not self._words.check([f"order/{number}"]):
                if time.monotonic() - since > self._timeout or self._words.check(["gone/0"]):
                    return Round()
                time.sleep(0.1)
            following = decode(self._words.get(f"order/{number}"), Round)
        except (FsdpctlError, RuntimeError):
            return Round()
        if following.nodes:
            self.members = following.nodes
        return following

    def leave(self) -> None:
        """Nothing more is said. Node 0's store goes with it: it waits a moment for the others."""
        self._ended.set()
        with suppressing_losses():
            self._words.set(f"gone/{self.own}", "")
            others = [f"gone/{node}" for node in self.members if node != self.own]
            if self.own == 0 and others:
                self._words.wait(others, timedelta(seconds=_LEAVE_SECONDS))

    def _beat(self, words: Store) -> None:
        count = 0
        while not self._ended.wait(_BEAT_SECONDS):
            count += 1
            with suppressing_losses():
                words.set(f"beat/{self.own}", str(count))


def reached_store(address: str, port: int, patience: float, *, is_first: bool) -> TCPStore:
    """The store at an address, as its server or as one that finds it there in time.

    Raises:
        UsageError: the address is not this machine's, or nobody is there.
    """
    if is_first:
        return bound_store(address, port)[0]
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=patience))
    except Exception as error:  # torch's own classes differ by version
        raise UsageError(
            f"{address}:{port}: the first node was not there within {patience:g} s: {error!s:.120}"
        ) from None
