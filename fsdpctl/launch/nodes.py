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
from fsdpctl.launch.handshake import EXCHANGE_ERRORS, Handshake, decode, encode
from fsdpctl.launch.outcome import NodeOutcome, RoundOutcome

_EXCHANGE_SECONDS = 0.5
_MAX_ELAPSED = 2.0  # most silence that an exchange adds: node 0 itself may have been suspended
_FORWARD_AFTER_SECONDS = 3.0  # silence after which node 0 forwards a node's last report
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
    """The message of a node to the other nodes; each exchange replaces it."""

    report_id: int = 0  # differs in every report
    round_index: int = 0  # the round of the following fields
    states: list[RankState] = field(default_factory=list)  # states of the node's ranks
    hangs: bool = False  # whether ranks of any node hang
    outcome: NodeOutcome | None = None
    # Keyed by the preceding round; only node 0 sets it.
    next_rounds: dict[int, RestartRound] = field(default_factory=dict)
    has_left: bool = False
    host: str = field(default_factory=socket.gethostname)

    @property
    def has_news(self) -> bool:
        return bool(self.hangs or self.outcome or self.next_rounds or self.has_left)


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The one key that nodes poll: the reports that node 0 forwards, usually none."""

    report_id: int = 0
    # By node: reports of failures, hangs and restarts, and the last ones of silent nodes.
    reports: dict[int, NodeReport] = field(default_factory=dict)
    silent_seconds: dict[int, float] = field(default_factory=dict)  # silent nodes only
    host: str = ""  # host of node 0


class NodeExchange:
    """The last reports of this node and of the other nodes.

    Note: a call on a dead connection blocks for up to 15 minutes, until the kernel closes it. So a
    thread exchanges all reports on a second connection, and callers get the last reports.
    """

    def __init__(self, store: Store, node_rank: int, count: int, lost_after: float) -> None:
        """Start as `node_rank` of `count`; node 0 counts as lost after `lost_after` seconds."""
        self.node_rank, self.nodes = node_rank, list(range(count))
        self.is_reporter = True  # False: another rank of this host writes the report
        self._store, self._lost_after = store, lost_after
        self._report, self._cluster_report = NodeReport(), ClusterReport()
        self._last_reports = dict[int, NodeReport]()  # empty except on node 0
        self._silent_seconds = dict.fromkeys(self.nodes, 0.0)
        self._collected_at = self._last_contact = time.monotonic()
        self._is_lost = self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def group_rank(self) -> int:
        """The position of this node among the remaining nodes."""
        return self.nodes.index(self.node_rank)

    def has_failed_elsewhere(self, round_index: int) -> bool:
        """Return whether another node's ranks failed in a round; True if node 0 has exited."""
        reports = self._other_reports(round_index).values()
        return self._is_lost or any(each.outcome and each.outcome.stops_others for each in reports)

    def hangs_elsewhere(self, round_index: int) -> bool:
        return any(each.hangs for each in self._other_reports(round_index).values())

    def publish_states(self, round_index: int, states: list[RankState]) -> None:
        """Publish rank states, which other nodes need if this node stops responding."""
        self._update_report(now=False, round_index=round_index, states=states)

    def share_states(
        self, round_index: int, states: list[RankState]
    ) -> tuple[list[RankState], int]:
        """Report that ranks hang, and wait for the reports of the other nodes.

        Returns the last known states of all ranks, and the first node that responds.
        """
        self._update_report(round_index=round_index, states=states, hangs=True)
        # Wait for a report of this round, or of a node that is in a later round.
        later = round_index, False
        self._wait_for_reports(_STATES_SECONDS, lambda x: (x.round_index, x.hangs) > later)
        all_states, reports = list(states), self._other_reports(round_index)
        for node, report in reports.items():
            silent = self._cluster_report.silent_seconds.get(node, 0.0)
            for state in report.states:
                if not report.hangs:
                    state = replace(
                        state, is_responsive=False, is_waiting=False,
                        silent_seconds=state.silent_seconds + silent,
                    )  # fmt: skip
                all_states.append(state)
        responding = [node for node, report in reports.items() if report.hangs]
        return all_states, min([self.node_rank, *responding])

    def leave(self, after_node: int | None = None) -> None:
        """Leave the run, but not before `after_node`.

        Node 0 waits a moment for the other nodes, because its store exits with it.
        """
        if after_node is not None:
            self._wait_for_reports(_STATES_SECONDS, nodes=[after_node])
        self._update_report(has_left=True)
        if self.node_rank == 0:
            self._wait_for_reports(_LEAVE_SECONDS)
        self._is_over = True
        self._wake.set()
        self._thread.join(_LEAVE_SECONDS)

    def _other_reports(self, round_index: int) -> Mapping[int, NodeReport]:
        reports = self._cluster_report.reports
        nodes = [node for node in self.nodes if node != self.node_rank and node in reports]
        return {node: reports[node] for node in nodes if reports[node].round_index == round_index}

    def _wait_for_reports(
        self,
        seconds: float,
        is_awaited: Callable[[NodeReport], bool] = lambda report: False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Wait until each of `nodes` has sent an awaited report, has left, or is unreachable.

        By default, wait for all other nodes.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_lost:
            cluster, silent = self._cluster_report, time.monotonic() - self._last_contact
            if silent > self._lost_after or all(
                cluster.silent_seconds.get(node, 0.0) > _UNREACHABLE_SECONDS
                or (
                    (report := cluster.reports.get(node)) is not None
                    and (report.has_left or is_awaited(report))
                )
                for node in nodes or self.nodes
                if node != self.node_rank
            ):
                return
            time.sleep(0.1)

    def _update_report(self, *, now: bool = True, **changes: Any) -> None:
        """Change the report, and publish it `now` or with the next exchange.

        Only one thread at a time calls this: the watchdog during a round, then the launcher.
        """
        report = self._report
        if changes.get("round_index", report.round_index) != report.round_index:
            report = NodeReport(next_rounds=report.next_rounds)  # nothing else of the last round
        self._report = replace(report, **changes)
        if now:
            self._wake.set()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.clear()
            is_last = self._is_over  # the report of `leave` must still be sent
            try:
                if self.is_reporter:
                    self._exchange_once()
            except DistStoreError:
                pass  # node 0 has not published yet
            except EXCHANGE_ERRORS:
                self._is_lost = True
                return
            if not is_last:
                self._wake.wait(_EXCHANGE_SECONDS)

    def _exchange_once(self) -> None:
        report = replace(self._report, report_id=time.time_ns())
        self._store.set(_report_key(self.node_rank), encode(report))
        if self.node_rank == 0:
            self._store.set(_CLUSTER_REPORT, encode(self._collect(report.report_id)))
        cluster = decode(self._store.get(_CLUSTER_REPORT), ClusterReport)
        if cluster.report_id != self._cluster_report.report_id:
            self._last_contact = time.monotonic()
        self._cluster_report = cluster

    def _collect(self, report_id: int) -> ClusterReport:
        now = time.monotonic()
        elapsed, self._collected_at = min(now - self._collected_at, _MAX_ELAPSED), now
        for node in self.nodes:
            self._silent_seconds[node] += elapsed
        known, check = self._last_reports, self._store.check
        nodes = [node for node in self.nodes if node in known or check([_report_key(node)])]
        texts = self._store.multi_get(list(map(_report_key, nodes)))
        for node, text in zip(nodes, texts, strict=True):
            report = decode(text, NodeReport)
            if report.report_id != known.get(node, NodeReport()).report_id:
                self._silent_seconds[node] = 0.0
            known[node] = report
        silent = {n: x for n, x in self._silent_seconds.items() if x > _FORWARD_AFTER_SECONDS}
        forwarded = {node: each for node, each in known.items() if node in silent or each.has_news}
        return ClusterReport(report_id, forwarded, silent, self._report.host)


def _report_key(node: int) -> str:
    return f"node/{node}"


class NodeLauncher(NodeExchange):
    """The launcher of this node, and its exchange with the launchers of the other nodes."""

    def __init__(self, launch: LaunchConfig) -> None:
        """Connect to node 0, or become node 0; UsageError if that is impossible."""
        assert launch.node_rank is not None
        assert launch.rdzv_endpoint is not None
        rank, count, self._timeout = launch.node_rank, launch.nnodes, launch.timeout
        self.address, self.port = resolve_endpoint(launch.rdzv_endpoint, for_others=True)
        _, self.interface = local_address(self.address, launch.interface)
        self.store = open_store(self.address, self.port, launch.timeout, hosts_store=rank == 0)
        self.handshake = Handshake(self.store, rank, count, noun="node", timeout=launch.timeout)
        # A second connection: a blocked call of the thread must not block `self.store`.
        store = TCPStore(self.address, self.port, is_master=False)
        super().__init__(store, rank, count, launch.used_hang_timeout)

    def exchange_outcomes(self, round_index: int, outcome: NodeOutcome) -> RoundOutcome:
        """Return how the ranks of all reachable nodes exited in a round."""
        self._update_report(round_index=round_index, states=[], outcome=outcome)
        # Wait for an outcome of this round, or for a node that is in a later round.
        later = round_index, False
        self._wait_for_reports(math.inf, lambda x: (x.round_index, x.outcome is not None) > later)
        reports = self._other_reports(round_index).items()
        outcomes = {node: report.outcome for node, report in reports if report.outcome}
        outcomes[self.node_rank] = outcome
        return RoundOutcome.combine(outcomes, self.node_rank, self._unreachable_nodes(outcomes))

    def _unreachable_nodes(self, outcomes: Mapping[int, NodeOutcome]) -> dict[int, str]:
        """Return the hosts of nodes without an outcome; if node 0 is one, of node 0 only."""
        if 0 not in outcomes:
            return {0: self._cluster_report.host}
        reports = self._cluster_report.reports
        missing = [node for node in self.nodes if node not in outcomes]
        return {node: reports[node].host if node in reports else "" for node in missing}

    def announce_next_round(self, round_index: int, next_round: RestartRound) -> None:
        """Tell the other nodes what follows round `round_index`; only node 0 does."""
        self._update_report(next_rounds={**self._report.next_rounds, round_index: next_round})
        self._set_nodes(next_round)

    def wait_for_next_round(self, round_index: int) -> RestartRound:
        """Return the next round that node 0 announces; without nodes if node 0 is unreachable."""
        self._wait_for_reports(self._timeout, lambda report: round_index in report.next_rounds, [0])
        report = self._cluster_report.reports.get(0, NodeReport())
        next_round = report.next_rounds.get(round_index, RestartRound())
        self._set_nodes(next_round)
        return next_round

    def _set_nodes(self, next_round: RestartRound) -> None:
        if next_round.nodes:
            self.nodes = next_round.nodes
