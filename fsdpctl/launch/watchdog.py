"""The watchdog: it detects ranks that hang, or that wait for ranks that have exited.

It is a thread of the launcher, whose main thread waits in torch's agent. If another launcher has
started the ranks, each rank has a watchdog thread. On each host, the first rank with a live
watchdog thread is in charge, because a hung rank may hold its interpreter lock. It kills ranks by
SIGKILL: with gloo, nothing else interrupts a rank that waits.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fsdpctl.comm.flight_recorder import CollectiveRecord
from fsdpctl.comm.rank_status import (
    DRAWING,
    FINISHING,
    READING,
    STATUS_PAGE,
    HostPages,
    RankStatus,
    make_status_file,
)
from fsdpctl.comm.world import Store
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.errors import ExitCode
from fsdpctl.launch.diagnosis import EXITED, UNKNOWN, RankState, describe_hang
from fsdpctl.launch.nodes import NodeExchange
from fsdpctl.resolve.launchers import LauncherRank

_POLL_SECONDS = 0.25
# The most seconds without progress that a poll adds: the watchdog may have been suspended itself.
_LONGEST_POLL = 1.0
_START_FACTOR = 4  # loading, compiling and the first collectives take longer than a step
_GRACE_SECONDS = 10.0  # time for ranks to exit after another rank has exited
_REPORT_SECONDS = 5.0  # the longest wait for answers of ranks
_STACK_SECONDS = 0.5  # ranks write their stacks in this time
_TAKEOVER_SECONDS = 5.0  # silence after which the next watchdog is in charge

Processes = dict[int, psutil.Process]  # running ranks, by local rank


class Watchdog:
    """A watch over the ranks of a host in one round; `hang` describes the hung ranks."""

    def __init__(
        self,
        status_file: Path,
        launch: LaunchConfig,
        exchange: NodeExchange | None = None,
        round_index: int = 0,
        *,
        pids: Callable[[], dict[int, int]] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Watch the ranks that write their status to `status_file`.

        A launcher passes `pids`, which returns the process ids of running workers by local rank.
        A watchdog in a rank gets `say` instead, which it calls before it kills the ranks.
        """
        assert launch.nproc_per_node is not None
        self.hang = ""
        self.failed_at: float | None = None  # when the first worker exited early
        self.killed_for_other_node = False  # ranks were killed only because another node failed
        self._pids, self._say, self._exchange, self._round_index = pids, say, exchange, round_index
        self._count = launch.nproc_per_node
        self._local_rank = int(os.environ["LOCAL_RANK"]) if pids is None else 0
        self._first_rank = (exchange.group_rank if exchange else 0) * self._count
        self._limit, self._timeout = launch.used_hang_timeout, launch.timeout
        self._statuses = [RankStatus(count=0, step=None, is_waiting=False, phase="")] * self._count
        self._silent_seconds = [0.0] * self._count  # seconds without progress, by rank
        # The same of the watchdog thread in each rank.
        self._watchdog_silent_seconds = [0.0] * self._count
        self._condition_began: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._pages = HostPages(status_file)

    def start(self) -> None:
        """Start the thread; it ends with the block or with the process."""
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        polled = time.monotonic()
        while not self._done.wait(_POLL_SECONDS):
            elapsed, polled = time.monotonic() - polled, time.monotonic()
            self._poll(min(elapsed, _LONGEST_POLL))
            if self._is_in_charge() and self._act():
                return

    def _poll(self, elapsed: float) -> None:
        STATUS_PAGE.count_watchdog_poll()  # for the watchdogs of other ranks
        statuses, watchdog_silent = self._pages.statuses(), self._watchdog_silent_seconds
        for local, (status, last) in enumerate(zip(statuses, self._statuses, strict=True)):
            self._silent_seconds[local] += elapsed
            if status.count != last.count or status.phase == FINISHING:
                self._silent_seconds[local] = 0.0
            watchdog_silent[local] += elapsed
            if status.watchdog_polls != last.watchdog_polls:
                watchdog_silent[local] = 0.0
        self._statuses = statuses

    def _is_in_charge(self) -> bool:
        """Return whether this watchdog is in charge of its host; then it also writes the report."""
        lower_ranks = self._watchdog_silent_seconds[: self._local_rank]
        # If states are requested already, another watchdog reports a hang.
        is_reported = any(each.is_record_requested for each in self._statuses)
        decides = not is_reported and all(each > _TAKEOVER_SECONDS for each in lower_ranks)
        if self._exchange:
            self._exchange.is_reporter = decides
        return decides

    def _act(self) -> bool:
        """Kill the ranks if they hang, or if other ranks have failed; return whether ranks hang."""
        round_index, exchange = self._round_index, self._exchange
        processes = _running_processes(self._known_pids())
        if exchange:
            exchange.publish_states(round_index, list(map(self._state, range(self._count))))
        if not processes:
            return False
        all_run = len(processes) == self._count
        if not all_run:
            self.failed_at = self.failed_at or time.time()
        stalled = [each for each in processes if self._silent_seconds[each] > self._limit_of(each)]
        # fsdpctl's launcher notices ranks that have exited. Under another launcher, ranks that
        # wait for an exited rank count as hung.
        waits_for_exited = not self._pids and any(self._statuses[x].is_waiting for x in stalled)
        hangs = bool(stalled) and (all_run or waits_for_exited)
        if hangs or (exchange and exchange.hangs_elsewhere(round_index)):
            self._kill_hung(processes)
            return True
        died = self._persists("died", not all_run)
        has_failed = bool(exchange and exchange.has_failed_elsewhere(round_index))
        others_died = self._persists("elsewhere", has_failed)
        is_idle = not any(map(self._makes_progress, processes))
        if self._pids and (died or others_died) and is_idle:
            self.killed_for_other_node = not died
            _kill(processes)  # they are stopped or blocked, and the agent would wait longer
        return False

    def _known_pids(self) -> dict[int, int]:
        if self._pids:
            return self._pids()
        return {local: status.pid for local, status in enumerate(self._statuses) if status.pid}

    def _makes_progress(self, local: int) -> bool:
        """Return whether a rank still makes progress, such as completing a checkpoint."""
        return self._statuses[local].count > 0 and self._silent_seconds[local] < _GRACE_SECONDS

    def _limit_of(self, local: int) -> float:
        """Return the seconds without progress after which a rank counts as hung."""
        status = self._statuses[local]
        if status.step is not None:
            return self._limit
        slow = self._limit * _START_FACTOR
        if status.phase in (READING, DRAWING, ""):
            return slow
        # Collectives run. NCCL's timeout must come later: it would not name the ranks that hang.
        return min(slow, 0.8 * self._timeout)

    def _persists(self, name: str, holds: bool) -> bool:
        """Return whether a condition has held for longer than ranks need to exit on their own."""
        if not holds:
            self._condition_began.pop(name, None)
            return False
        now = time.monotonic()
        return now - self._condition_began.setdefault(name, now) > _GRACE_SECONDS

    def _kill_hung(self, processes: Processes) -> None:
        states, exchange, reporter_node = self._collect_states(processes), self._exchange, 0
        if exchange:
            states, reporter_node = exchange.share_states(self._round_index, states)
        limit = max(map(self._limit_of, range(self._count)))
        self.hang = describe_hang(states, limit, before_first_step=limit != self._limit)
        self.failed_at = time.time()
        if self._say and (exchange is None or exchange.node_rank == reporter_node):
            self._say(self.hang)
        # Kill only after the reporter's node has reported: killing makes ranks of other hosts fail.
        if self._say and exchange:
            exchange.leave(after_node=reporter_node)
        _kill(processes)
        if self._say:
            os._exit(ExitCode.FAILED)

    def _collect_states(self, processes: Processes) -> list[RankState]:
        until = time.monotonic() + _REPORT_SECONDS
        # Before its first update, a rank has no handler of the signal, which would kill it.
        requested = [local for local in processes if self._statuses[local].count]
        for local in requested:
            self._pages.request(local)
            with contextlib.suppress(psutil.Error):
                processes[local].send_signal(signal.SIGUSR2)  # worker.py registers faulthandler
        time.sleep(_STACK_SECONDS)
        while time.monotonic() < until and None in map(self._pages.answer, requested):
            time.sleep(_POLL_SECONDS)
        pids = sorted(self._known_pids().items())
        process_states = {local: _process_state(pid) for local, pid in pids if local in processes}
        return [self._state(local, process_states.get(local, EXITED)) for local, _ in pids]

    def _state(self, local: int, process_state: str | None = None) -> RankState:
        """Return the state of a rank. None: the rank was not asked, and counts as responsive."""
        answer = CollectiveRecord() if process_state is None else self._pages.answer(local)
        record, status = answer or CollectiveRecord(), self._statuses[local]
        return RankState(
            self._first_rank + local, socket.gethostname(),
            process_state=UNKNOWN if process_state is None else process_state,
            silent_seconds=self._silent_seconds[local], step=status.step, phase=status.phase,
            is_waiting=status.is_waiting, started_collectives=record.started,
            pending=record.pending, is_responsive=answer is not None,
        )  # fmt: skip


def watch_as_rank(
    rank: LauncherRank,
    launch: LaunchConfig,
    store: Store,
    exchange: NodeExchange | None,
    say: Callable[[str], None],
) -> None:
    """Start a watchdog thread in this rank; the ranks of a host share a file of their status.

    `store` is shared by all ranks, `exchange` connects hosts, and `say` prints a line.
    """
    key = f"status-file/{rank.rank // rank.local_world_size}"
    path = Path()  # if rank 0 cannot make the file, no rank can open this path
    if rank.local_rank == 0:
        with contextlib.suppress(OSError):
            path = make_status_file(rank.local_world_size)
        store.set(key, str(path))
    try:
        path = Path(store.get(key).decode())
        STATUS_PAGE.open(path, rank.local_rank)
        watchdog = Watchdog(path, launch, exchange, say=say)
    except OSError as error:
        say(f"rank {rank.rank}: no watchdog: {path}: {error.strerror}")
        return
    if store.add(f"{key}/opened", 1) == rank.local_world_size:
        path.unlink(missing_ok=True)  # all ranks have opened it; killed ranks would leave it
    watchdog.start()


def _running_processes(pids: dict[int, int]) -> Processes:
    processes = {}
    for local, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                processes[local] = process
    return processes


def _process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[0]
    return UNKNOWN


def _kill(processes: Processes) -> None:
    for each in processes.values():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid():
                each.kill()
