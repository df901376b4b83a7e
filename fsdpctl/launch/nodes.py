"""The launchers of several machines, while their ranks train: who is alive, and how ranks ended."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from fsdpctl.comm.stores import PrefixStore, Store, TCPStore
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.launch.handshake import Meeting, decode, encode, suppressing_losses
from fsdpctl.launch.hang import RankState
from fsdpctl.launch.interface import own_address, split_endpoint
from fsdpctl.launch.outcome import Ended, Outcome
from fsdpctl.launch.rendezvous import bound_store
from fsdpctl.launch.timeout_store import BoundedStore, Noticed

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
        address, self.port = split_endpoint(launch.rdzv_endpoint, for_others=True)
        self.endpoint_address = address
        self.address, self.interface = own_address(address, launch.interface)
        self.store: TCPStore = reached_store(
            address, self.port, launch.timeout, is_first=self.own == 0
        )
        self.meeting = Meeting(
            self.store, self.own, launch.nnodes, noun="node", patience=launch.timeout
        )
        # Connections of their own, for the threads that use them: who waits in one holds it.
        words, states, failed, hang, beats = (
            PrefixStore("nodes", TCPStore(address, self.port, is_master=False)) for _ in range(5)
        )
        patience = launch.hang_timeout or launch.timeout / 2  # a cable may be out for less
        self._words = BoundedStore(words, patience)
        self._states = BoundedStore(states, _STATES_SECONDS)
        self._failed = Noticed(failed, otherwise=True)  # nobody can say
        self._hangs = Noticed(hang, otherwise=False)
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
        return self._failed.has(f"failed/{number}")

    def hangs_elsewhere(self, number: int) -> bool:
        """Whether the launcher of another node says that ranks stand still in this round."""
        return self._hangs.has(f"hang/{number}")

    def share_states(self, number: int, own: list[RankState]) -> list[RankState]:
        """Where the ranks of all nodes stand that say so in time."""
        found = list(own)
        with suppressing_losses():
            self._states.set(f"states/{number}/{self.own}", encode(own))
            self._states.set(f"hang/{number}", "")
        until = time.monotonic() + _STATES_SECONDS
        for node in (each for each in self.members if each != self.own):
            with suppressing_losses():
                key, left = f"states/{number}/{node}", max(0.1, until - time.monotonic())
                self._states.wait([key], timedelta(seconds=left))
                found += decode(self._states.get(key), list[RankState])
        return found

    def share(self, number: int, own: Ended) -> Outcome:
        """How the ranks of all nodes ended in this round, as far as their launchers live."""
        with suppressing_losses():
            if own.has_failed:
                self._words.set(f"failed/{number}", "")
            self._words.set(f"ended/{number}/{self.own}", encode(own))
        found: dict[int, Ended] = {self.own: own}
        signs = {node: (b"", time.monotonic()) for node in self.members if node != self.own}
        awaited = set(signs)
        while awaited:
            for node in sorted(awaited):
                heard = self._heard_of(number, node)
                if isinstance(heard, Ended):
                    found[node] = heard
                elif heard is not None and heard != signs[node][0]:
                    signs[node] = heard, time.monotonic()
                is_silent = time.monotonic() - signs[node][1] > _SILENCE_SECONDS
                if node in found or heard is None or is_silent:
                    awaited.remove(node)
            time.sleep(0.1)
        return Outcome.of(found, self.own, tuple(node for node in signs if node not in found))

    def _heard_of(self, number: int, node: int) -> Ended | bytes | None:
        """How the ranks of another node ended; else its last beat; None where it is gone."""
        ended, beat = f"ended/{number}/{node}", f"beat/{node}"
        try:
            if self._words.check([ended]):
                return decode(self._words.get(ended), Ended)
            if self._words.check([f"gone/{node}"]):
                return None
            return self._words.get(beat) if self._words.check([beat]) else b""
        except (FsdpctlError, RuntimeError):
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
