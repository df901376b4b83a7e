"""The watchdog: it detects ranks that hang, or that wait for ranks that have exited.

It is a thread of the launcher, whose main thread waits in torch's agent. If another launcher has
started the ranks, each rank has a watchdog thread. On each host, the first rank with a live
watchdog thread decides, because a hung rank may hold its interpreter lock. The watchdog kills ranks
by SIGKILL: with gloo, nothing else interrupts a rank that waits.
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
# After the watchdog was suspended, it must not blame the ranks for the time that has passed.
_LONGEST_POLL = 1.0
_START_FACTOR = 4  # loading, compiling and the first collectives take longer than a step
_GRACE_SECONDS = 10.0  # time for ranks to exit after another rank has exited
_REPORT_SECONDS = 5.0  # time for ranks to write their stacks and to answer
_STACK_SECONDS = 0.5  # time to write stacks
_TAKEOVER_SECONDS = 5.0  # silence after which the next rank's watchdog decides

Ranks = dict[int, psutil.Process]  # running ranks, by local rank


class Watchdog:
    """A watch over the ranks of a host in one round; `hang` describes the hung ranks."""

    def __init__(
        self,
        pages: Path,
        launch: LaunchConfig,
        exchange: NodeExchange | None = None,
        round_index: int = 0,
        *,
        pids: Callable[[], dict[int, int]] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Watch the ranks that write their status to the file `pages`.

        A launcher passes `pids`, which returns the process ids of running workers by local rank.
        A rank passes `say`, which is called before the ranks are killed.
        """
        assert launch.nproc_per_node is not None
        self.hang = ""
        self.failed_at: float | None = None  # when the first worker was missing
        # Whether the watchdog killed ranks only because ranks of another node failed.
        self.killed_for_other_node = False
        self._pids, self._say, self._exchange, self._round_index = pids, say, exchange, round_index
        self._count = launch.nproc_per_node
        self._local_rank = int(os.environ["LOCAL_RANK"]) if pids is None else 0
        self._first_rank = (exchange.node_index if exchange else 0) * self._count
        self._limit, self._timeout = launch.used_hang_timeout, launch.timeout
        self._statuses = [RankStatus(0, None, is_waiting=False, phase="")] * self._count
        self._silent_seconds = [0.0] * self._count  # seconds since each rank's last heartbeat
        # Seconds since the watchdog thread of each rank was seen running.
        self._watchdog_silent_seconds = [0.0] * self._count
        self._since: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._pages = HostPages(pages)

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
            if self._is_deciding() and self._check():
                return

    def _poll(self, elapsed: float) -> None:
        STATUS_PAGE.heartbeat()
        statuses, silent = self._pages.statuses(), self._watchdog_silent_seconds
        for local, (status, last) in enumerate(zip(statuses, self._statuses, strict=True)):
            moved = status.count != last.count or status.phase == FINISHING
            self._silent_seconds[local] = 0.0 if moved else self._silent_seconds[local] + elapsed
            runs = status.heartbeats != last.heartbeats
            silent[local] = 0.0 if runs else silent[local] + elapsed
        self._statuses = statuses

    def _is_deciding(self) -> bool:
        lower_ranks = self._watchdog_silent_seconds[: self._local_rank]
        # If states are requested already, another watchdog reports a hang.
        is_reported = any(each.is_record_requested for each in self._statuses)
        decides = not is_reported and all(each > _TAKEOVER_SECONDS for each in lower_ranks)
        if self._exchange:
            self._exchange.is_reporter = decides
        return decides

    def _check(self) -> bool:
        """Kill the ranks if they hang, or if other ranks have failed; return whether they hang."""
        round_index, exchange = self._round_index, self._exchange
        ranks = _running_processes(self._running())
        if exchange:
            exchange.publish_states(round_index, [self._state(each) for each in range(self._count)])
        if not ranks:
            return False
        all_run = len(ranks) == self._count
        if not all_run:
            self.failed_at = self.failed_at or time.time()
        stalled = [each for each in ranks if self._silent_seconds[each] > self._limit_of(each)]
        # fsdpctl's launcher notices ranks that have exited; other launchers may not. Then, ranks
        # that wait for an exited rank hang.
        is_stuck = stalled and (
            all_run or (not self._pids and any(self._statuses[x].is_waiting for x in stalled))
        )
        if is_stuck or (exchange and exchange.is_stuck_elsewhere(round_index)):
            self._kill_stuck(ranks)
            return True
        died = self._persists("died", not all_run)
        failed_elsewhere = self._persists(
            "elsewhere", bool(exchange and exchange.has_failed_elsewhere(round_index))
        )
        if self._pids and (died or failed_elsewhere) and not any(map(self._makes_progress, ranks)):
            self.killed_for_other_node = not died
            _kill(ranks)  # they are stopped or blocked, and the agent would wait longer
        return False

    def _running(self) -> dict[int, int]:
        if self._pids:
            return self._pids()
        return {local: status.pid for local, status in enumerate(self._statuses) if status.pid}

    def _makes_progress(self, local: int) -> bool:
        """Return whether a rank still makes progress, such as completing a checkpoint."""
        return self._statuses[local].count > 0 and self._silent_seconds[local] < _GRACE_SECONDS

    def _limit_of(self, local: int) -> float:
        """Return the seconds without a heartbeat after which a rank hangs.

        After a rank has loaded its weights, collectives run, and NCCL's watchdog would end the
        process after `launch.timeout` without naming the ranks that cause the hang.
        """
        status = self._statuses[local]
        if status.step is not None:
            return self._limit
        slow = self._limit * _START_FACTOR
        loads = status.phase in (READING, DRAWING, "")
        return slow if loads else min(slow, 0.8 * self._timeout)

    def _persists(self, name: str, holds: bool) -> bool:
        """Return whether a condition has held for longer than ranks need to exit on their own."""
        if not holds:
            self._since.pop(name, None)
            return False
        return time.monotonic() - self._since.setdefault(name, time.monotonic()) > _GRACE_SECONDS

    def _kill_stuck(self, ranks: Ranks) -> None:
        states, first, exchange = self._collect_states(ranks), 0, self._exchange
        if exchange:
            states, first = exchange.share_states(self._round_index, states)
        limit = max(map(self._limit_of, range(self._count)))
        self.hang = describe_hang(states, limit, is_usual=limit == self._limit)
        self.failed_at = time.time()
        if self._say and (exchange is None or exchange.node == first):
            self._say(self.hang)
        # Ranks of other hosts fail once these ranks are killed: the report must come first.
        if self._say and exchange:
            exchange.leave(after_node=first)
        _kill(ranks)
        if self._say:
            os._exit(ExitCode.FAILED)

    def _collect_states(self, ranks: Ranks) -> list[RankState]:
        until = time.monotonic() + _REPORT_SECONDS
        # Before its first heartbeat, a rank has no handler of the signal, which would kill it.
        requested = [local for local in ranks if self._statuses[local].count]
        for local in requested:
            self._pages.request(local)
            with contextlib.suppress(psutil.Error):
                ranks[local].send_signal(signal.SIGUSR2)
        time.sleep(_STACK_SECONDS)
        while time.monotonic() < until and None in map(self._pages.answer, requested):
            time.sleep(_POLL_SECONDS)
        running = sorted(self._running().items())
        return [self._state(x, _process_state(pid) if x in ranks else EXITED) for x, pid in running]

    def _state(self, local: int, letter: str | None = None) -> RankState:
        answer = CollectiveRecord() if letter is None else self._pages.answer(local)
        recorded, status = answer or CollectiveRecord(), self._statuses[local]
        return RankState(
            self._first_rank + local, socket.gethostname(), UNKNOWN if letter is None else letter,
            self._silent_seconds[local], status.step, status.phase, status.is_waiting,
            recorded.started, recorded.pending, answer is not None,
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
    key, path = f"pages/{rank.rank // rank.local_world_size}", Path()
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


def _running_processes(pids: dict[int, int]) -> Ranks:
    ranks: Ranks = {}
    for local, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                ranks[local] = process
    return ranks


def _process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[0]
    return UNKNOWN


def _kill(ranks: Ranks) -> None:
    for each in ranks.values():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid():
                each.kill()
