"""The exchange of the launchers of several nodes, or of ranks on several hosts, during a run."""

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpctl.comm.world import DistStoreError, Store, TCPStore
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.launch.addresses import local_address, open_store, resolve_endpoint
from fsdpctl.launch.diagnosis import RankState
from fsdpctl.launch.handshake import UNREACHABLE, Handshake, decode, encode
from fsdpctl.launch.outcome import NodeOutcome, RoundOutcome

_HEARTBEAT_SECONDS = 0.5
_LONGEST_HEARTBEAT = 2.0  # a node 0 that was suspended must not take the others for silent
_FORWARD_AFTER_SECONDS = 3.0  # without a beat: what a node has told last is passed on
_UNREACHABLE_SECONDS = 30.0  # a shorter network failure does no harm
_STATES_SECONDS = 10.0  # for other nodes to send the states of their ranks
_LEAVE_SECONDS = 2.0
_CLUSTER_REPORT = "news"


@dataclass(frozen=True, slots=True)
class RestartRound:
    """The nodes and ranks of a restart; without nodes, the run is over."""

    nodes: list[int] = field(default_factory=list)
    nproc_per_node: int = 0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The message of a node to the others; each beat replaces it."""

    heartbeat: int = 0  # changes, even if another rank tells it
    round_index: int = 0  # of the round that the rest is about
    states: list[RankState] = field(default_factory=list)  # of its ranks
    is_stuck: bool = False  # some of them hang, or those of another node
    outcome: NodeOutcome | None = None
    next_rounds: dict[int, RestartRound] = field(
        default_factory=dict
    )  # by round; only node 0 decides
    has_left: bool = False
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The messages that node 0 passes on, so that the others read one key: mostly none."""

    heartbeat: int = 0
    reports: dict[int, NodeReport] = field(
        default_factory=dict
    )  # by nodes of which it is news, or quiet
    silent_seconds: dict[int, float] = field(default_factory=dict)  # seconds without a beat
    host: str = ""  # of node 0


class NodeExchange:
    """The last messages of this node and of the others.

    Note: a call on a dead link blocks for a quarter of an hour, until the kernel gives up the
    connection. So a thread exchanges everything on one of its own, and callers get what is known.
    """

    def __init__(self, store: Store, node: int, count: int, patience: float) -> None:
        """Begin as node `own` of `count`; node 0 counts as lost after `patience` seconds."""
        self.node, self.members = node, list(range(count))
        self.is_reporter = True  # else another rank of this host does
        self._store, self._timeout_seconds = store, patience
        self._report, self._cluster_report = NodeReport(), ClusterReport()
        self._last_reports = dict[int, NodeReport]()  # on node 0
        self._silent_seconds = dict.fromkeys(self.members, 0.0)
        self._collected_at = self._last_contact = time.monotonic()
        self._is_lost = self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def place(self) -> tuple[int, int]:
        """Return this node's number among the members, and the number of members."""
        return self.members.index(self.node), len(self.members)

    def has_failed_elsewhere(self, number: int) -> bool:
        """Return whether another node's ranks failed in this round; True if node 0 has exited."""
        others = self._other_reports(number).values()
        return self._is_lost or any(each.outcome and each.outcome.has_failed for each in others)

    def is_stuck_elsewhere(self, number: int) -> bool:
        return any(each.is_stuck for each in self._other_reports(number).values())

    def publish_states(self, number: int, own: list[RankState]) -> None:
        """Have others know the states of this node's ranks in case that it falls silent."""
        self._update_report(round_index=number, states=own)

    def share_states(self, number: int, own: list[RankState]) -> tuple[list[RankState], int]:
        """Tell that ranks hang; return the known states of all, and the first node that answers."""
        self._publish_now(round_index=number, states=own, is_stuck=True)
        self._wait_for_reports(
            _STATES_SECONDS, lambda told: (told.round_index, told.is_stuck) > (number, False)
        )
        found, others = list(own), self._other_reports(number)
        for node, told in others.items():
            since = self._cluster_report.silent_seconds.get(node, 0.0)
            for each in told.states:
                late = replace(
                    each, is_responsive=False, is_waiting=False, seconds=each.seconds + since
                )
                found.append(each if told.is_stuck else late)
        return found, min([self.node, *(node for node, told in others.items() if told.is_stuck)])

    def leave(self, after: int | None = None) -> None:
        """Leave the run, but not before node `after`.

        Node 0 waits a moment for the others, because its store exits with it.
        """
        if after is not None:
            self._wait_for_reports(_STATES_SECONDS, lambda told: False, [after])
        self._publish_now(has_left=True)
        if self.node == 0:
            self._wait_for_reports(_LEAVE_SECONDS, lambda told: False)
        self._is_over = True
        self._wake.set()
        self._thread.join(_LEAVE_SECONDS)

    def _other_reports(self, number: int) -> Mapping[int, NodeReport]:
        told = self._cluster_report.reports
        others = [each for each in self.members if each != self.node and each in told]
        return {each: told[each] for each in others if told[each].round_index == number}

    def _wait_for_reports(
        self,
        seconds: float,
        has_told: Callable[[NodeReport], bool],
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Wait until `nodes`, or all others, have told something, have left, or are silent."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_lost:
            news, silent = self._cluster_report, time.monotonic() - self._last_contact
            awaited = [each for each in nodes or self.members if each != self.node]
            if silent > self._timeout_seconds or all(
                news.silent_seconds.get(each, 0.0) > _UNREACHABLE_SECONDS
                or (
                    each in news.reports
                    and (news.reports[each].has_left or has_told(news.reports[each]))
                )
                for each in awaited
            ):
                return
            time.sleep(0.1)

    def _publish_now(self, **changes: Any) -> None:
        self._update_report(**changes)
        self._wake.set()

    def _update_report(self, **changes: Any) -> None:
        told = self._report
        if (
            changes.get("round_index", told.round_index) != told.round_index
        ):  # nothing of the last round
            told = NodeReport(next_rounds=told.next_rounds)
        self._report = replace(told, **changes)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.clear()
            is_last = self._is_over
            try:
                if self.is_reporter:
                    self._exchange_once()
            except DistStoreError:
                pass  # node 0 has said nothing so far
            except UNREACHABLE:
                self._is_lost = True
                return
            if not is_last:
                self._wake.wait(_HEARTBEAT_SECONDS)

    def _exchange_once(self) -> None:
        told = replace(self._report, heartbeat=time.time_ns())
        self._store.set(f"told/{self.node}", encode(told))
        if self.node == 0:
            self._store.set(_CLUSTER_REPORT, encode(self._collect(told.heartbeat)))
        news = decode(self._store.get(_CLUSTER_REPORT), ClusterReport)
        if news.heartbeat != self._cluster_report.heartbeat:
            self._last_contact = time.monotonic()
        self._cluster_report = news

    def _collect(self, beat: int) -> ClusterReport:
        now = time.monotonic()
        passed, self._collected_at = min(now - self._collected_at, _LONGEST_HEARTBEAT), now
        for node in self.members:
            self._silent_seconds[node] += passed
        known = [x for x in self.members if x in self._last_reports or self._store.check([_key(x)])]
        texts = self._store.multi_get(list(map(_key, known)))
        for node, text in zip(known, texts, strict=True):
            told = decode(text, NodeReport)
            if told.heartbeat != self._last_reports.get(node, NodeReport()).heartbeat:
                self._silent_seconds[node] = 0.0
            self._last_reports[node] = told
        quiet = {
            n: seconds
            for n, seconds in self._silent_seconds.items()
            if seconds > _FORWARD_AFTER_SECONDS
        }
        told_now = {
            n: each
            for n, each in self._last_reports.items()
            if n in quiet or each.is_stuck or each.outcome or each.next_rounds or each.has_left
        }
        return ClusterReport(beat, told_now, quiet, self._report.host)


def _key(node: int) -> str:
    return f"told/{node}"


class NodeLauncher(NodeExchange):
    """This node's launcher, and its exchange with those of the other nodes."""

    def __init__(self, launch: LaunchConfig) -> None:
        """Connect to node 0, or become node 0; UsageError if that is impossible."""
        assert launch.node_rank is not None
        assert launch.rdzv_endpoint is not None
        own, self._timeout = launch.node_rank, launch.timeout
        where = resolve_endpoint(launch.rdzv_endpoint, for_others=True)
        self.endpoint_address, self.port = where
        _, self.interface = local_address(where[0], launch.interface)
        self.store = open_store(*where, launch.timeout, is_first=own == 0)
        self.handshake = Handshake(
            self.store, own, launch.nnodes, noun="node", patience=launch.timeout
        )
        theirs = TCPStore(*where, is_master=False)
        super().__init__(theirs, own, launch.nnodes, launch.hang_limit)

    def exchange_outcomes(self, number: int, own: NodeOutcome) -> RoundOutcome:
        """Return how the ranks of all nodes exited in this round, if their launchers are alive."""
        self._publish_now(round_index=number, states=[], outcome=own)
        self._wait_for_reports(
            math.inf, lambda told: (told.round_index, told.outcome is not None) > (number, False)
        )
        found = {
            node: told.outcome for node, told in self._other_reports(number).items() if told.outcome
        }
        found[self.node] = own
        return RoundOutcome.combine(found, self.node, self._unreachable_nodes(found))

    def _unreachable_nodes(self, found: Mapping[int, NodeOutcome]) -> dict[int, str]:
        """Return the hosts of nodes that did not report; without node 0, nothing is known."""
        if 0 not in found:
            return {0: self._cluster_report.host}
        told = self._cluster_report.reports
        return {n: told[n].host if n in told else "" for n in self.members if n not in found}

    def announce_next_round(self, number: int, following: RestartRound) -> None:
        """Tell the other nodes what follows round `number`; only node 0 does."""
        self._publish_now(next_rounds={**self._report.next_rounds, number: following})
        self._set_members(following)

    def wait_for_next_round(self, number: int) -> RestartRound:
        """Return what follows by node 0's order; the run is over if node 0 is unreachable."""
        self._wait_for_reports(self._timeout, lambda told: number in told.next_rounds, [0])
        following = self._cluster_report.reports.get(0, NodeReport()).next_rounds.get(
            number, RestartRound()
        )
        self._set_members(following)
        return following

    def _set_members(self, following: RestartRound) -> None:
        if following.nodes:
            self.members = following.nodes
