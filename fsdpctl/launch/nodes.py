"""The exchange of the launchers of several nodes, or of ranks on several hosts, during a run."""

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpctl.comm.world import DistStoreError, Store, TCPStore
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.launch.addresses import own_address, reached_store, split_endpoint
from fsdpctl.launch.diagnosis import RankState
from fsdpctl.launch.handshake import UNREACHABLE, Handshake, decode, encode
from fsdpctl.launch.outcome import Ended, Outcome

_BEAT_SECONDS = 0.5
_LONGEST_BEAT = 2.0  # a node 0 that was suspended must not take the others for silent
_QUIET_SECONDS = 3.0  # without a beat: what a node has told last is passed on
_SILENCE_SECONDS = 30.0  # a shorter network failure does no harm
_STATES_SECONDS = 10.0  # for other nodes to send the states of their ranks
_LEAVE_SECONDS = 2.0
_NEWS = "news"


@dataclass(frozen=True, slots=True)
class RestartRound:
    """The nodes and ranks of a restart; without nodes, the run is over."""

    nodes: list[int] = field(default_factory=list)
    nproc_per_node: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """The message of a node to the others; each beat replaces it."""

    beat: int = 0  # changes, even if another rank tells it
    number: int = 0  # of the round that the rest is about
    states: list[RankState] = field(default_factory=list)  # of its ranks
    hangs: bool = False  # some of them hang, or those of another node
    ended: Ended | None = None
    orders: dict[int, RestartRound] = field(default_factory=dict)  # by round; only node 0 decides
    has_left: bool = False
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class News:
    """The messages that node 0 passes on, so that the others read one key: mostly none."""

    beat: int = 0
    told: dict[int, Told] = field(default_factory=dict)  # by nodes of which it is news, or quiet
    quiet: dict[int, float] = field(default_factory=dict)  # seconds without a beat
    host: str = ""  # of node 0


class Exchange:
    """The last messages of this node and of the others.

    Note: a call on a dead link blocks for a quarter of an hour, until the kernel gives up the
    connection. So a thread exchanges everything on one of its own, and callers get what is known.
    """

    def __init__(self, store: Store, own: int, count: int, patience: float) -> None:
        """Begin as node `own` of `count`; node 0 counts as lost after `patience` seconds."""
        self.own, self.members = own, list(range(count))
        self.speaks = True  # else another rank of this host does
        self._store, self._patience = store, patience
        self._told, self._news = Told(), News()
        self._seen = dict[int, Told]()  # on node 0
        self._quiet = dict.fromkeys(self.members, 0.0)
        self._collected_at = self._heard_at = time.monotonic()
        self._is_lost = self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        self._thread.start()

    def place(self) -> tuple[int, int]:
        """Return this node's number among the members, and the number of members."""
        return self.members.index(self.own), len(self.members)

    def has_failed_elsewhere(self, number: int) -> bool:
        """Return whether another node's ranks failed in this round; True if node 0 has exited."""
        others = self._others(number).values()
        return self._is_lost or any(each.ended and each.ended.has_failed for each in others)

    def hangs_elsewhere(self, number: int) -> bool:
        return any(each.hangs for each in self._others(number).values())

    def tell_states(self, number: int, own: list[RankState]) -> None:
        """Have others know the states of this node's ranks in case that it falls silent."""
        self._change(number=number, states=own)

    def share_states(self, number: int, own: list[RankState]) -> tuple[list[RankState], int]:
        """Tell that ranks hang; return the known states of all, and the first node that answers."""
        self._tell(number=number, states=own, hangs=True)
        self._await(_STATES_SECONDS, lambda told: (told.number, told.hangs) > (number, False))
        found, others = list(own), self._others(number)
        for node, told in others.items():
            since = self._news.quiet.get(node, 0.0)
            for each in told.states:
                late = replace(each, answers=False, waits=False, seconds=each.seconds + since)
                found.append(each if told.hangs else late)
        return found, min([self.own, *(node for node, told in others.items() if told.hangs)])

    def leave(self, after: int | None = None) -> None:
        """Leave the run, but not before node `after`.

        Node 0 waits a moment for the others, because its store exits with it.
        """
        if after is not None:
            self._await(_STATES_SECONDS, lambda told: False, [after])
        self._tell(has_left=True)
        if self.own == 0:
            self._await(_LEAVE_SECONDS, lambda told: False)
        self._is_over = True
        self._wake.set()
        self._thread.join(_LEAVE_SECONDS)

    def _others(self, number: int) -> Mapping[int, Told]:
        told = self._news.told
        others = [each for each in self.members if each != self.own and each in told]
        return {each: told[each] for each in others if told[each].number == number}

    def _await(
        self, seconds: float, has_told: Callable[[Told], bool], nodes: Sequence[int] | None = None
    ) -> None:
        """Wait until `nodes`, or all others, have told something, have left, or are silent."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_lost:
            news, silent = self._news, time.monotonic() - self._heard_at
            awaited = [each for each in nodes or self.members if each != self.own]
            if silent > self._patience or all(
                news.quiet.get(each, 0.0) > _SILENCE_SECONDS
                or (each in news.told and (news.told[each].has_left or has_told(news.told[each])))
                for each in awaited
            ):
                return
            time.sleep(0.1)

    def _tell(self, **changes: Any) -> None:
        self._change(**changes)
        self._wake.set()

    def _change(self, **changes: Any) -> None:
        told = self._told
        if changes.get("number", told.number) != told.number:  # nothing of the last round
            told = Told(orders=told.orders)
        self._told = replace(told, **changes)

    def _exchange(self) -> None:
        is_last = False
        while not is_last:
            self._wake.clear()
            is_last = self._is_over
            try:
                if self.speaks:
                    self._pass_on()
            except DistStoreError:
                pass  # node 0 has said nothing so far
            except UNREACHABLE:
                self._is_lost = True
                return
            if not is_last:
                self._wake.wait(_BEAT_SECONDS)

    def _pass_on(self) -> None:
        told = replace(self._told, beat=time.time_ns())
        self._store.set(f"told/{self.own}", encode(told))
        if self.own == 0:
            self._store.set(_NEWS, encode(self._collected(told.beat)))
        news = decode(self._store.get(_NEWS), News)
        if news.beat != self._news.beat:
            self._heard_at = time.monotonic()
        self._news = news

    def _collected(self, beat: int) -> News:
        now = time.monotonic()
        passed, self._collected_at = min(now - self._collected_at, _LONGEST_BEAT), now
        for node in self.members:
            self._quiet[node] += passed
        known = [x for x in self.members if x in self._seen or self._store.check([_key(x)])]
        texts = self._store.multi_get(list(map(_key, known)))
        for node, text in zip(known, texts, strict=True):
            told = decode(text, Told)
            if told.beat != self._seen.get(node, Told()).beat:
                self._quiet[node] = 0.0
            self._seen[node] = told
        quiet = {n: seconds for n, seconds in self._quiet.items() if seconds > _QUIET_SECONDS}
        told_now = {
            n: each
            for n, each in self._seen.items()
            if n in quiet or each.hangs or each.ended or each.orders or each.has_left
        }
        return News(beat, told_now, quiet, self._told.host)


def _key(node: int) -> str:
    return f"told/{node}"


class Nodes(Exchange):
    """This node's launcher, and its exchange with those of the other nodes."""

    def __init__(self, launch: LaunchConfig) -> None:
        """Connect to node 0, or become node 0; UsageError if that is impossible."""
        assert launch.node_rank is not None
        assert launch.rdzv_endpoint is not None
        own, self._timeout = launch.node_rank, launch.timeout
        where = split_endpoint(launch.rdzv_endpoint, for_others=True)
        self.endpoint_address, self.port = where
        _, self.interface = own_address(where[0], launch.interface)
        self.store = reached_store(*where, launch.timeout, is_first=own == 0)
        self.handshake = Handshake(
            self.store, own, launch.nnodes, noun="node", patience=launch.timeout
        )
        theirs = TCPStore(*where, is_master=False)
        super().__init__(theirs, own, launch.nnodes, launch.hang_limit)

    def share(self, number: int, own: Ended) -> Outcome:
        """Return how the ranks of all nodes exited in this round, if their launchers are alive."""
        self._tell(number=number, states=[], ended=own)
        self._await(math.inf, lambda told: (told.number, told.ended is not None) > (number, False))
        found = {node: told.ended for node, told in self._others(number).items() if told.ended}
        found[self.own] = own
        return Outcome.of(found, self.own, self._silent(found))

    def _silent(self, found: Mapping[int, Ended]) -> dict[int, str]:
        """Return the hosts of nodes that did not report; without node 0, nothing is known."""
        if 0 not in found:
            return {0: self._news.host}
        told = self._news.told
        return {n: told[n].host if n in told else "" for n in self.members if n not in found}

    def order(self, number: int, following: RestartRound) -> None:
        """Tell the other nodes what follows round `number`; only node 0 does."""
        self._tell(orders={**self._told.orders, number: following})
        self._follow(following)

    def await_order(self, number: int) -> RestartRound:
        """Return what follows by node 0's order; the run is over if node 0 is unreachable."""
        self._await(self._timeout, lambda told: number in told.orders, [0])
        following = self._news.told.get(0, Told()).orders.get(number, RestartRound())
        self._follow(following)
        return following

    def _follow(self, following: RestartRound) -> None:
        if following.nodes:
            self.members = following.nodes
