"""The launchers of several nodes: which are alive, how their ranks exited, and which ranks hang."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from fsdpctl.comm.world import PrefixStore, Store, TCPStore
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import UsageError
from fsdpctl.io.files import silenced_errors
from fsdpctl.launch.handshake import UNREACHABLE, Handshake, decode, encode
from fsdpctl.launch.outcome import Ended, Outcome
from fsdpctl.launch.rendezvous import (
    MOMENT,
    KeyWatcher,
    TimeoutStore,
    bound_store,
    own_address,
    split_endpoint,
    within,
)
from fsdpctl.resolve.launchers import endpoint_of

_STOPPED, _UNINTERRUPTIBLE = "T", "D"
_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 30.0  # without a heartbeat: a shorter network failure does no harm
_STATES_SECONDS = 5.0  # for other nodes to send the states of their ranks
_LEAVE_SECONDS = 2.0
_ANSWER_SECONDS = 30.0  # a server that runs answers at once
_BACKOFF_SECONDS = 4.0  # between the last trials of torch's client


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, as its launcher sees it."""

    rank: int
    host: str
    state: str  # of the process: the kernel's letter
    seconds: float  # since its last heartbeat
    step: int | None
    place: str
    waits: bool  # for other ranks
    # Number of collectives it has started, by process group; the last one's kind is in `pending`.
    begun: dict[str, int] = field(default_factory=dict)
    pending: str = ""  # the collective that it started last, if that is not complete

    def __str__(self) -> str:
        step = "before its first step" if self.step is None else f"step {self.step}"
        blocked = {_STOPPED: ", stopped by a signal", _UNINTERRUPTIBLE: ", blocked in a device"}
        waits = ", waits for other ranks" if self.waits else ""
        pending = f" in {self.pending}" if self.pending else ""
        return (
            f"rank {self.rank} on {self.host}: {step}, {self.place or 'starting'}{waits}{pending}"
            f"{blocked.get(self.state, '')}, for {self.seconds:.0f} s"
        )


def culprits(states: Sequence[RankState]) -> list[int]:
    """Return the ranks that the others wait for, or an empty list if unknown.

    Stopped ranks come first, then ranks blocked in a device, then ranks that started fewer
    collectives than their process group, then ranks that do not wait while others do.
    """
    for letter in (_STOPPED, _UNINTERRUPTIBLE):
        if found := [each.rank for each in states if each.state == letter]:
            return found
    behind = Counter[int]()
    for group in {name for each in states for name in each.begun}:
        counts = {each.rank: each.begun[group] for each in states if group in each.begun}
        least, most = min(counts.values()), max(counts.values())
        behind.update(rank for rank, count in counts.items() if count == least < most)
    if behind:
        return sorted(behind)
    busy = [each.rank for each in states if not each.waits]
    return busy if len(busy) < len(states) else []


def report(states: Sequence[RankState], limit: float, *, is_usual: bool = True) -> str:
    """Describe in one line which ranks have had no heartbeat for `limit` seconds, and where.

    `is_usual`: the limit is launch.hang_timeout; before the first step it may be longer.
    """
    found = culprits(states)
    shown = [each for each in states if each.rank in found] or list(states)
    named = "; ".join(map(str, shown[:4]))
    more = f"; and {len(shown) - 4} more" if len(shown) > 4 else ""
    setting = (
        f"launch.hang_timeout={limit:g} s" if is_usual else f"{limit:g} s before its first step"
    )
    return f"no progress for more than {setting}: {named}{more}"


@dataclass(frozen=True, slots=True)
class RestartRound:
    """The nodes and ranks of a restart; without nodes, the run is over."""

    nodes: list[int] = field(default_factory=list)
    nproc_per_node: int = 0


class Nodes:
    """This node's launcher, and its connections to the others."""

    def __init__(self, launch: LaunchConfig) -> None:
        """Connect to node 0, or become node 0; UsageError if that is impossible."""
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
        self.handshake = Handshake(
            self.store, self.own, launch.nnodes, noun="node", patience=launch.timeout
        )
        # Each thread has its own connection, because a call that waits blocks its connection.
        messages, states, failed, hang, beats = (
            PrefixStore("nodes", TCPStore(address, self.port, is_master=False)) for _ in range(5)
        )
        patience = launch.hang_timeout or launch.timeout / 2  # longer than a short network failure
        self._messages = TimeoutStore(messages, patience)
        self._states = TimeoutStore(states, _STATES_SECONDS)
        self._failed = KeyWatcher(failed, default=True)
        self._hangs = KeyWatcher(hang, default=False)
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(beats,), daemon=True).start()

    def place(self) -> tuple[int, int]:
        """Return this node's number among the members, and the number of members."""
        return list(self.members).index(self.own), len(self.members)

    def has_failed_elsewhere(self, number: int) -> bool:
        """Return whether another node's ranks failed in this round; True if unknown."""
        return self._failed.has(f"failed/{number}")

    def hangs_elsewhere(self, number: int) -> bool:
        """Return whether another node's launcher reports a hang in this round."""
        return self._hangs.has(f"hang/{number}")

    def share_states(self, number: int, own: list[RankState]) -> list[RankState]:
        """Return the states of the ranks of all nodes that send them in time."""
        found = list(own)
        with suppress(*UNREACHABLE):
            self._states.set(f"states/{number}/{self.own}", encode(own))
            self._states.set(f"hang/{number}", "")
        until = time.monotonic() + _STATES_SECONDS
        for node in (each for each in self.members if each != self.own):
            with suppress(*UNREACHABLE):
                key, left = f"states/{number}/{node}", max(0.1, until - time.monotonic())
                self._states.wait([key], timedelta(seconds=left))
                found += decode(self._states.get(key), list[RankState])
        return found

    def share(self, number: int, own: Ended) -> Outcome:
        """Return how the ranks of all nodes exited in this round, if their launchers are alive."""
        with suppress(*UNREACHABLE):
            if own.has_failed:
                self._messages.set(f"failed/{number}", "")
            self._messages.set(f"ended/{number}/{self.own}", encode(own))
        found: dict[int, Ended] = {self.own: own}
        beats = {node: (b"", time.monotonic()) for node in self.members if node != self.own}
        awaited = set(beats)
        while awaited:
            for node in sorted(awaited):
                latest = self._latest_of(number, node)
                if isinstance(latest, Ended):
                    found[node] = latest
                elif latest is not None and latest != beats[node][0]:
                    beats[node] = latest, time.monotonic()
                is_silent = time.monotonic() - beats[node][1] > _SILENCE_SECONDS
                if node in found or latest is None or is_silent:
                    awaited.remove(node)
            time.sleep(0.1)
        return Outcome.of(found, self.own, tuple(node for node in beats if node not in found))

    def _latest_of(self, number: int, node: int) -> Ended | bytes | None:
        """Return how a node's ranks exited, else its last heartbeat; None if it has left."""
        ended, beat = f"ended/{number}/{node}", f"beat/{node}"
        try:
            if self._messages.check([ended]):
                return decode(self._messages.get(ended), Ended)
            if self._messages.check([f"gone/{node}"]):
                return None
            return self._messages.get(beat) if self._messages.check([beat]) else b""
        except UNREACHABLE:
            return None

    def order(self, number: int, following: RestartRound) -> None:
        """Tell the other nodes what follows round `number`; only node 0 does."""
        with suppress(*UNREACHABLE):
            self._messages.set(f"order/{number}", encode(following))
        self._follow(following)

    def await_order(self, number: int) -> RestartRound:
        """Return what follows by node 0's order; the run is over if node 0 is unreachable."""
        since = time.monotonic()
        try:
            while not self._messages.check([f"order/{number}"]):
                if time.monotonic() - since > self._timeout or self._messages.check(["gone/0"]):
                    return RestartRound()
                time.sleep(0.1)
            following = decode(self._messages.get(f"order/{number}"), RestartRound)
        except UNREACHABLE:
            return RestartRound()
        self._follow(following)
        return following

    def _follow(self, following: RestartRound) -> None:
        if following.nodes:
            self.members = following.nodes

    def leave(self) -> None:
        """Leave the run. Node 0 waits a moment for the others, because its store exits with it."""
        self._ended.set()
        with suppress(*UNREACHABLE):
            self._messages.set(f"gone/{self.own}", "")
            others = [f"gone/{node}" for node in self.members if node != self.own]
            if self.own == 0 and others:
                self._messages.wait(others, timedelta(seconds=_LEAVE_SECONDS))

    def _beat(self, store: Store) -> None:
        count = 0
        while not self._ended.wait(_BEAT_SECONDS):
            count += 1
            with suppress(*UNREACHABLE):
                store.set(f"beat/{self.own}", str(count))


def reached_store(address: str, port: int, patience: float, *, is_first: bool) -> TCPStore:
    """Return the store at an address, as its server or as a client; UsageError if out of reach."""
    return bound_store(address, port)[0] if is_first else connected_store(address, port, patience)


def connected_store(address: str, port: int, patience: float) -> TCPStore:
    """Return a client of the store at an address, once there is one.

    Torch's own client prints a C++ stack if nothing listens, and it waits without end for a server
    that accepts connections and does not answer.

    Raises:
        UsageError: If no store answers in time.
    """
    where, deadline = endpoint_of(address, port), time.monotonic() + patience
    limit = f"within {patience:g} s (launch.timeout)"
    while cause := _refusal(address, port, max(MOMENT, deadline - time.monotonic())):
        if time.monotonic() + MOMENT > deadline:
            raise UsageError(
                f"{where}: node 0 not reachable {limit}: {cause}; start the command with "
                "launch.node_rank=0 on that host"
            )
        time.sleep(MOMENT)
    # Torch prints a C++ stack for each answer that is not a store's, until its own timeout. A call
    # that is left behind must not end while the process exits, which would abort.
    most = min(max(MOMENT, deadline - time.monotonic()), _ANSWER_SECONDS)
    limits = timedelta(seconds=most), timedelta(seconds=patience + 2 * _ANSWER_SECONDS)
    try:
        with silenced_errors():
            connect = lambda: TCPStore(address, port, is_master=False, timeout=limits[0])  # noqa: E731
            store = within(most + _BACKOFF_SECONDS, connect)
        store.set_timeout(limits[1])
        return store
    except (TimeoutError, RuntimeError):
        raise UsageError(
            f"{where}: another program listens there, which does not answer as node 0; "
            "set launch.rdzv_endpoint to HOST:PORT of node 0, with a port that is free there"
        ) from None


def _refusal(address: str, port: int, seconds: float) -> str:
    """Return why no server accepts a connection, or an empty string."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or "timed out"
    return ""
