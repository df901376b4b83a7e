"""A launcher's watchdog: it detects ranks that hang, or that wait for ranks that have exited.

It is a thread, because the main thread waits in torch's agent. It ends ranks by SIGKILL: with gloo,
nothing else interrupts a rank that waits.
"""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from fsdpctl.comm.rank_status import (
    FINISHING,
    LOADING,
    READING,
    RankStatus,
    make_status_file,
    read_rank_statuses,
)
from fsdpctl.comm.recorder import Recorded
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.launch.nodes import Nodes, RankState, report

FOLDER = "FSDPCTL_FOLDER"  # environment variable: the directory of workers' files for the launcher
PAGES, ASK = "pulse", "ask"  # files there
_POLL_SECONDS = 0.25
_LONGEST_POLL = 1.0  # a launcher that was suspended itself must not blame its ranks
_START_FACTOR = 4  # loading, compiling and the first collectives take longer than a step
_GRACE_SECONDS = 10.0  # for ranks to exit on their own after another one has
_REPORT_SECONDS = 2.0  # for ranks to write their stacks


Ranks = dict[int, psutil.Process]  # running ones, by their number on this node


class Watchdog:
    """Watches the workers of one round; `hang` describes the ranks that hung in one line."""

    def __init__(
        self,
        folder: Path,
        launch: LaunchConfig,
        pids: Callable[[], dict[int, int]],
        nodes: Nodes | None = None,
        number: int = 0,
    ) -> None:
        """Watch the workers of a node in a round.

        `folder` has the workers' files for the launcher; `pids` returns the process ids of running
        workers by local rank.
        """
        assert launch.nproc_per_node is not None
        self.hang = ""
        self.failed_at: float | None = None  # when the first worker was missing
        self.follows = False  # whether it killed ranks only because those of another node failed
        self._folder, self._pids, self._nodes, self._number = folder, pids, nodes, number
        self._count = launch.nproc_per_node
        self._first_rank = (0 if nodes is None else nodes.place()[0]) * self._count
        self._limit, self._timeout = launch.hang_timeout or launch.timeout / 2, launch.timeout
        self._beats = [RankStatus(0, None, waits=False, place="")] * self._count
        self._still = [0.0] * self._count  # seconds since each rank's last heartbeat
        self._since: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        make_status_file(folder / PAGES, self._count)
        self._pages = (folder / PAGES).open("rb")  # readable even if the directory is deleted

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._pages.close()

    def _run(self) -> None:
        polled = time.monotonic()
        while not self._done.wait(_POLL_SECONDS):
            passed, polled = time.monotonic() - polled, time.monotonic()
            ranks = _alive(self._pids())
            self._poll(min(passed, _LONGEST_POLL))
            if not ranks:
                continue
            all_run = len(ranks) == self._count
            if not all_run:
                self.failed_at = self.failed_at or time.time()
            late = (self._still[each] > self._limit_of(each) for each in range(self._count))
            nodes, number = self._nodes, self._number
            if (all_run and any(late)) or (nodes and nodes.hangs_elsewhere(number)):
                self._end_hang(ranks)
                return
            died = self._lasts("died", not all_run)
            follows = self._lasts("elsewhere", bool(nodes and nodes.has_failed_elsewhere(number)))
            if (died or follows) and not any(map(self._has_moved, ranks)):
                self.follows = not died
                _kill(ranks)  # stopped, or blocked: the agent itself waits longer

    def _poll(self, passed: float) -> None:
        beats = read_rank_statuses(self._pages)
        for local, beat in enumerate(beats):
            moved = beat.count != self._beats[local].count or beat.place == FINISHING
            self._still[local] = 0.0 if moved else self._still[local] + passed
        self._beats = beats

    def _has_moved(self, local: int) -> bool:
        """Return whether a rank still makes progress, such as completing a checkpoint."""
        return self._beats[local].count > 0 and self._still[local] < _GRACE_SECONDS

    def _limit_of(self, local: int) -> float:
        """Return the seconds without a heartbeat after which a rank hangs.

        After a rank has loaded its weights, collectives run, and NCCL's watchdog would end the
        process after `launch.timeout` without naming the ranks that cause the hang.
        """
        beat = self._beats[local]
        if beat.step is not None and beat.place != READING:
            return self._limit
        slow = self._limit * _START_FACTOR
        return slow if beat.place in (READING, LOADING, "") else min(slow, 0.8 * self._timeout)

    def _lasts(self, what: str, is_so: bool) -> bool:
        """Return whether a condition has held for longer than ranks need to exit on their own."""
        if not is_so:
            self._since.pop(what, None)
            return False
        return time.monotonic() - self._since.setdefault(what, time.monotonic()) > _GRACE_SECONDS

    def _end_hang(self, ranks: Ranks) -> None:
        """Have all ranks write their stacks, find the cause of the hang, and kill them."""
        own = self._states(ranks)
        states = own if self._nodes is None else self._nodes.share_states(self._number, own)
        limit = max(map(self._limit_of, range(self._count)))
        self.hang = report(states, limit, is_usual=limit == self._limit)
        self.failed_at = time.time()
        _kill(ranks)

    def _states(self, ranks: Ranks) -> list[RankState]:
        with contextlib.suppress(OSError):  # a full disk must not prevent the rest
            (self._folder / ASK).touch()
        for local, each in ranks.items():
            if self._beats[local].count:  # before that, the signal would kill it
                with contextlib.suppress(psutil.Error):
                    each.send_signal(signal.SIGUSR2)
        time.sleep(_REPORT_SECONDS)
        return [self._state(local, each) for local, each in ranks.items()]

    def _state(self, index: int, process: psutil.Process) -> RankState:
        letter, found = "", Recorded()
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            letter = stat.rpartition(")")[2].split()[0]
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            written = (self._folder / f"{ASK}-{index}").read_bytes()
            found = msgspec.json.decode(written, type=Recorded)
        beat = self._beats[index]
        return RankState(
            self._first_rank + index, socket.gethostname(), letter,
            self._still[index], beat.step, beat.place, beat.waits, found.begun, found.pending,
        )  # fmt: skip


def _alive(pids: dict[int, int]) -> Ranks:
    found: Ranks = {}
    for local, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found[local] = process
    return found


def _kill(ranks: Ranks) -> None:
    for each in ranks.values():
        with contextlib.suppress(psutil.Error):
            each.kill()
