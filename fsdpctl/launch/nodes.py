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
# After node 0 was suspended, it must not take the other nodes for unreachable.
_LONGEST_HEARTBEAT = 2.0
# After this silence of a node, node 0 forwards the node's last report.
_FORWARD_AFTER_SECONDS = 3.0
_UNREACHABLE_SECONDS = 30.0  # a shorter network failure does no harm
_STATES_SECONDS = 10.0  # time in which other nodes send the states of their ranks
_LEAVE_SECONDS = 2.0
_CLUSTER_REPORT = "cluster"


@dataclass(frozen=True, slots=True)
class RestartRound:
    """The nodes and ranks of a restart; without nodes, the run is over."""

    nodes: list[int] = field(default_factory=list)
    nproc_per_node: int = 0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The message of a node to the other nodes; each heartbeat replaces it."""

    heartbeat: int = 0  # differs in every report
    round_index: int = 0  # the round of the following fields
    states: list[RankState] = field(default_factory=list)  # states of the node's ranks
    is_stuck: bool = False  # whether ranks of any node hang
    outcome: NodeOutcome | None = None
    # By the index of the round before; only node 0 decides.
    next_rounds: dict[int, RestartRound] = field(default_factory=dict)
    has_left: bool = False
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The reports that node 0 forwards, so that nodes poll one key; it is usually empty."""

    heartbeat: int = 0
    # By node: reports of failures, hangs and restarts, and the last ones of silent nodes.
    reports: dict[int, NodeReport] = field(default_factory=dict)
    silent_seconds: dict[int, float] = field(default_factory=dict)  # silent nodes only
    host: str = ""  # host of node 0


class NodeExchange:
    """The last reports of this node and of the other nodes.

    Note: a call on a dead connection blocks for up to 15 minutes, until the kernel closes it. So a
    thread exchanges all reports on a second connection, and callers get the last reports.
    """

    def __init__(self, store: Store, node: int, count: int, patience: float) -> None:
        """Start as `node` of `count` nodes; node 0 counts as lost after `patience` seconds."""
        self.node, self.members = node, list(range(count))
        self.is_reporter = True  # False: another rank of this host writes the report
        self._store, self._patience = store, patience
        self._report, self._cluster_report = NodeReport(), ClusterReport()
        self._last_reports = dict[int, NodeReport]()  # empty except on node 0
        self._silent_seconds = dict.fromkeys(self.members, 0.0)
        self._collected_at = self._last_contact = time.monotonic()
        self._is_lost = self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def node_index(self) -> int:
        """The position of this node among the remaining members."""
        return self.members.index(self.node)

    def has_failed_elsewhere(self, round_index: int) -> bool:
        """Return whether another node's ranks failed in a round; True if node 0 has exited."""
        reports = self._other_reports(round_index).values()
        return self._is_lost or any(each.outcome and each.outcome.has_failed for each in reports)

    def is_stuck_elsewhere(self, round_index: int) -> bool:
        return any(each.is_stuck for each in self._other_reports(round_index).values())

    def publish_states(self, round_index: int, states: list[RankState]) -> None:
        """Publish rank states, which other nodes need if this node stops responding."""
        self._update_report(round_index=round_index, states=states)

    def share_states(
        self, round_index: int, states: list[RankState]
    ) -> tuple[list[RankState], int]:
        """Report that ranks hang, and wait for the reports of the other nodes.

        Returns the last known states of all ranks, and the first node that responds.
        """
        self._publish_now(round_index=round_index, states=states, is_stuck=True)
        self._wait_for_reports(
            _STATES_SECONDS,
            lambda report: (report.round_index, report.is_stuck) > (round_index, False),
        )
        all_states, reports = list(states), self._other_reports(round_index)
        for node, report in reports.items():
            silent = self._cluster_report.silent_seconds.get(node, 0.0)
            for state in report.states:
                silent_state = replace(
                    state, is_responsive=False, is_waiting=False, seconds=state.seconds + silent
                )
                all_states.append(state if report.is_stuck else silent_state)
        responding = [node for node, report in reports.items() if report.is_stuck]
        return all_states, min([self.node, *responding])

    def leave(self, after_node: int | None = None) -> None:
        """Leave the run, but not before `after_node`.

        Node 0 waits a moment for the other nodes, because its store exits with it.
        """
        if after_node is not None:
            self._wait_for_reports(_STATES_SECONDS, lambda report: False, [after_node])
        self._publish_now(has_left=True)
        if self.node == 0:
            self._wait_for_reports(_LEAVE_SECONDS, lambda report: False)
        self._is_over = True
        self._wake.set()
        self._thread.join(_LEAVE_SECONDS)

    def _other_reports(self, round_index: int) -> Mapping[int, NodeReport]:
        reports = self._cluster_report.reports
        nodes = [node for node in self.members if node != self.node and node in reports]
        return {node: reports[node] for node in nodes if reports[node].round_index == round_index}

    def _wait_for_reports(
        self,
        seconds: float,
        is_awaited: Callable[[NodeReport], bool],
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Wait until each of `nodes` has sent an awaited report, has left, or is unreachable.

        By default, wait for all other nodes.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_lost:
            cluster, silent = self._cluster_report, time.monotonic() - self._last_contact
            if silent > self._patience or all(
                cluster.silent_seconds.get(node, 0.0) > _UNREACHABLE_SECONDS
                or (
                    (report := cluster.reports.get(node)) is not None
                    and (report.has_left or is_awaited(report))
                )
                for node in nodes or self.members
                if node != self.node
            ):
                return
            time.sleep(0.1)

    def _publish_now(self, **changes: Any) -> None:
        self._update_report(**changes)
        self._wake.set()

    def _update_report(self, **changes: Any) -> None:
        report = self._report
        if changes.get("round_index", report.round_index) != report.round_index:
            report = NodeReport(next_rounds=report.next_rounds)  # nothing else of the last round
        self._report = replace(report, **changes)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.clear()
            is_last = self._is_over
            try:
                if self.is_reporter:
                    self._exchange_once()
            except DistStoreError:
                pass  # node 0 has not published yet
            except UNREACHABLE:
                self._is_lost = True
                return
            if not is_last:
                self._wake.wait(_HEARTBEAT_SECONDS)

    def _exchange_once(self) -> None:
        report = replace(self._report, heartbeat=time.time_ns())
        self._store.set(_key(self.node), encode(report))
        if self.node == 0:
            self._store.set(_CLUSTER_REPORT, encode(self._collect(report.heartbeat)))
        cluster = decode(self._store.get(_CLUSTER_REPORT), ClusterReport)
        if cluster.heartbeat != self._cluster_report.heartbeat:
            self._last_contact = time.monotonic()
        self._cluster_report = cluster

    def _collect(self, heartbeat: int) -> ClusterReport:
        now = time.monotonic()
        elapsed, self._collected_at = min(now - self._collected_at, _LONGEST_HEARTBEAT), now
        for node in self.members:
            self._silent_seconds[node] += elapsed
        nodes = [x for x in self.members if x in self._last_reports or self._store.check([_key(x)])]
        texts = self._store.multi_get(list(map(_key, nodes)))
        for node, text in zip(nodes, texts, strict=True):
            report = decode(text, NodeReport)
            if report.heartbeat != self._last_reports.get(node, NodeReport()).heartbeat:
                self._silent_seconds[node] = 0.0
            self._last_reports[node] = report
        silent = {n: x for n, x in self._silent_seconds.items() if x > _FORWARD_AFTER_SECONDS}
        forwarded = {
            node: report
            for node, report in self._last_reports.items()
            if node in silent
            or report.is_stuck
            or report.outcome
            or report.next_rounds
            or report.has_left
        }
        return ClusterReport(heartbeat, forwarded, silent, self._report.host)


def _key(node: int) -> str:
    return f"node/{node}"


class NodeLauncher(NodeExchange):
    """The launcher of this node, and its exchange with the launchers of the other nodes."""

    def __init__(self, launch: LaunchConfig) -> None:
        """Connect to node 0, or become node 0; UsageError if that is impossible."""
        assert launch.node_rank is not None
        assert launch.rdzv_endpoint is not None
        node, self._timeout = launch.node_rank, launch.timeout
        endpoint = resolve_endpoint(launch.rdzv_endpoint, for_others=True)
        self.endpoint_address, self.port = endpoint
        _, self.interface = local_address(endpoint[0], launch.interface)
        self.store = open_store(*endpoint, launch.timeout, hosts_store=node == 0)
        self.handshake = Handshake(
            self.store, node, launch.nnodes, noun="node", timeout=launch.timeout
        )
        # A second connection: a blocked call of the thread must not block `self.store`.
        store = TCPStore(*endpoint, is_master=False)
        super().__init__(store, node, launch.nnodes, launch.used_hang_timeout)

    def exchange_outcomes(self, round_index: int, outcome: NodeOutcome) -> RoundOutcome:
        """Return how the ranks of all nodes exited in a round, if their launchers respond."""
        self._publish_now(round_index=round_index, states=[], outcome=outcome)
        self._wait_for_reports(
            math.inf,
            lambda report: (report.round_index, report.outcome is not None) > (round_index, False),
        )
        reports = self._other_reports(round_index).items()
        outcomes = {node: report.outcome for node, report in reports if report.outcome}
        outcomes[self.node] = outcome
        return RoundOutcome.combine(outcomes, self.node, self._unreachable_nodes(outcomes))

    def _unreachable_nodes(self, outcomes: Mapping[int, NodeOutcome]) -> dict[int, str]:
        """Return the hosts of nodes that did not report; without node 0, nothing else is known."""
        if 0 not in outcomes:
            return {0: self._cluster_report.host}
        reports = self._cluster_report.reports
        missing = [node for node in self.members if node not in outcomes]
        return {node: reports[node].host if node in reports else "" for node in missing}

    def announce_next_round(self, round_index: int, following: RestartRound) -> None:
        """Tell the other nodes what follows round `round_index`; only node 0 does."""
        self._publish_now(next_rounds={**self._report.next_rounds, round_index: following})
        self._set_members(following)

    def wait_for_next_round(self, round_index: int) -> RestartRound:
        """Return what node 0 announced to follow; the run is over if node 0 is unreachable."""
        self._wait_for_reports(self._timeout, lambda report: round_index in report.next_rounds, [0])
        report = self._cluster_report.reports.get(0, NodeReport())
        following = report.next_rounds.get(round_index, RestartRound())
        self._set_members(following)
        return following

    def _set_members(self, following: RestartRound) -> None:
        if following.nodes:
            self.members = following.nodes
