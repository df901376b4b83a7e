"""The watchdog: it detects ranks that hang, or that wait for ranks that have exited.

It is a thread of the launcher, whose main thread waits in torch's agent, or of each rank that
another launcher has started: of those on a host, the first whose thread still runs decides, because
a rank that hangs may hold its interpreter. It ends ranks by SIGKILL: with gloo, nothing else
interrupts a rank that waits.
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

from fsdpctl.comm.flight_recorder import Recorded
from fsdpctl.comm.rank_status import (
    FINISHING,
    LOADING,
    RANK_STATUS,
    READING,
    HostPages,
    RankStatus,
    make_status_file,
)
from fsdpctl.comm.world import Store
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import ExitCode
from fsdpctl.launch.diagnosis import GONE, UNKNOWN, RankState, report
from fsdpctl.launch.nodes import Exchange
from fsdpctl.resolve.launchers import LauncherRank

_POLL_SECONDS = 0.25
_LONGEST_POLL = 1.0  # a watchdog that was suspended itself must not blame the ranks
_START_FACTOR = 4  # loading, compiling and the first collectives take longer than a step
_GRACE_SECONDS = 10.0  # for ranks to exit on their own after another one has
_REPORT_SECONDS = 5.0  # for ranks to write their stacks and to answer
_STACK_SECONDS = 0.5  # to write stacks
_SUCCEED_SECONDS = 5.0  # after which a rank's watchdog replaces one that does not run

Ranks = dict[int, psutil.Process]  # running ones, by their number on this host


class Watchdog:
    """Watches the ranks of a host in one round; `hang` describes those that hung in one line."""

    def __init__(
        self,
        pages: Path,
        launch: LaunchConfig,
        exchange: Exchange | None = None,
        number: int = 0,
        *,
        pids: Callable[[], dict[int, int]] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Watch the ranks that write to a file of pages, in a round.

        A launcher gives `pids`, which returns the process ids of running workers by local rank;
        a rank gives `say`, which is called before the ranks are killed.
        """
        assert launch.nproc_per_node is not None
        self.hang = ""
        self.failed_at: float | None = None  # when the first worker was missing
        self.follows = False  # whether it killed ranks only because those of another node failed
        self._pids, self._say, self._exchange, self._number = pids, say, exchange, number
        self._count = launch.nproc_per_node
        self._local_rank = int(os.environ["LOCAL_RANK"]) if pids is None else 0
        self._first_rank = (exchange.place()[0] if exchange else 0) * self._count
        self._limit, self._timeout = launch.hang_limit, launch.timeout
        self._beats = [RankStatus(0, None, waits=False, place="")] * self._count
        self._still = [0.0] * self._count  # seconds since each rank's last heartbeat
        self._unwatched = [0.0] * self._count  # and since its own watchdog was seen
        self._since: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._pages = HostPages(pages)

    def start(self) -> None:
        """Begin to watch, until the block or the process ends."""
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
            passed, polled = time.monotonic() - polled, time.monotonic()
            self._poll(min(passed, _LONGEST_POLL))
            if self._decides() and self._judge():
                return

    def _poll(self, passed: float) -> None:
        RANK_STATUS.looked()
        beats = self._pages.statuses()
        for local, (beat, last) in enumerate(zip(beats, self._beats, strict=True)):
            moved = beat.count != last.count or beat.place == FINISHING
            self._still[local] = 0.0 if moved else self._still[local] + passed
            looked = beat.looks != last.looks
            self._unwatched[local] = 0.0 if looked else self._unwatched[local] + passed
        self._beats = beats

    def _decides(self) -> bool:
        before = self._unwatched[: self._local_rank]
        is_asked = any(each.is_asked for each in self._beats)  # another watchdog ends a hang
        decides = not is_asked and all(each > _SUCCEED_SECONDS for each in before)
        if self._exchange:
            self._exchange.speaks = decides
        return decides

    def _judge(self) -> bool:
        """Kill the ranks if they hang, or if others have failed; return whether they hang."""
        number, exchange = self._number, self._exchange
        ranks = _alive(self._running())
        if exchange:
            exchange.tell_states(number, [self._state(each) for each in range(self._count)])
        if not ranks:
            return False
        all_run = len(ranks) == self._count
        if not all_run:
            self.failed_at = self.failed_at or time.time()
        late = [each for each in ranks if self._still[each] > self._limit_of(each)]
        # A launcher's agent sees ranks that have exited; other launchers may not.
        hangs = late and (all_run or (not self._pids and any(self._beats[n].waits for n in late)))
        if hangs or (exchange and exchange.hangs_elsewhere(number)):
            self._end_hang(ranks)
            return True
        died = self._lasts("died", not all_run)
        follows = self._lasts("elsewhere", bool(exchange and exchange.has_failed_elsewhere(number)))
        if self._pids and (died or follows) and not any(map(self._has_moved, ranks)):
            self.follows = not died
            _kill(ranks)  # stopped, or blocked: the agent itself waits longer
        return False

    def _running(self) -> dict[int, int]:
        if self._pids:
            return self._pids()
        return {local: beat.pid for local, beat in enumerate(self._beats) if beat.pid}

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
        states, first, exchange = self._asked(ranks), 0, self._exchange
        if exchange:
            states, first = exchange.share_states(self._number, states)
        limit = max(map(self._limit_of, range(self._count)))
        self.hang = report(states, limit, is_usual=limit == self._limit)
        self.failed_at = time.time()
        if self._say and (exchange is None or exchange.own == first):
            self._say(self.hang)
        if self._say and exchange:  # earlier, ranks of other hosts would fail unnamed
            exchange.leave(after=first)
        _kill(ranks)
        if self._say:
            os._exit(ExitCode.FAILED)

    def _asked(self, ranks: Ranks) -> list[RankState]:
        until = time.monotonic() + _REPORT_SECONDS
        asked = [local for local in ranks if self._beats[local].count]
        for local in asked:  # before its first heartbeat, the signal would kill a rank
            self._pages.ask(local)
            with contextlib.suppress(psutil.Error):
                ranks[local].send_signal(signal.SIGUSR2)
        time.sleep(_STACK_SECONDS)
        while time.monotonic() < until and None in map(self._pages.answer, asked):
            time.sleep(_POLL_SECONDS)
        running = sorted(self._running().items())
        return [self._state(x, _letter(pid) if x in ranks else GONE) for x, pid in running]

    def _state(self, local: int, letter: str | None = None) -> RankState:
        answer = Recorded() if letter is None else self._pages.answer(local)
        found, beat = answer or Recorded(), self._beats[local]
        return RankState(
            self._first_rank + local, socket.gethostname(), UNKNOWN if letter is None else letter,
            self._still[local], beat.step, beat.place, beat.waits, found.begun, found.pending,
            answer is not None,
        )  # fmt: skip


def watch_as_rank(
    place: LauncherRank,
    launch: LaunchConfig,
    store: Store,
    exchange: Exchange | None,
    say: Callable[[str], None],
) -> None:
    """Watch the ranks of this host from a thread of each of them, which share a file of pages.

    `store` is that of all ranks; `exchange` is with other hosts; `say` prints a line.
    """
    key, path = f"pages/{place.rank // place.local_world_size}", Path()
    if place.local_rank == 0:
        with contextlib.suppress(OSError):
            path = make_status_file(place.local_world_size)
        store.set(key, str(path))
    try:
        path = Path(store.get(key).decode())
        RANK_STATUS.open(path, place.local_rank)
        watchdog = Watchdog(path, launch, exchange, say=say)
    except OSError as error:
        say(f"rank {place.rank}: no watchdog: {path}: {error.strerror}")
        return
    if store.add(f"{key}/opened", 1) == place.local_world_size:
        path.unlink(missing_ok=True)  # now, because it would remain if the ranks are killed
    watchdog.start()


def _alive(pids: dict[int, int]) -> Ranks:
    found: Ranks = {}
    for local, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found[local] = process
    return found


def _letter(pid: int) -> str:
    """Return the kernel's letter for the state of a process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[0]
    return UNKNOWN


def _kill(ranks: Ranks) -> None:
    for each in ranks.values():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid():
                each.kill()
