"""A launcher's watch over its ranks: one that stands still, one that died beside others that live.

A thread, since the main one waits in torch's agent. What it ends it kills: over gloo nothing else
interrupts a rank that waits.
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

from fsdpctl.comm.pulse import FINISHING, LOADING, READING, Beat, make_pages, read_beats
from fsdpctl.comm.recorder import Recorded
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.launch.hang import RankState, report
from fsdpctl.launch.nodes import Nodes

FOLDER = "FSDPCTL_FOLDER"  # in the environment: where workers leave what they say to us
PAGES, ASK = "pulse", "ask"  # files there
_LOOKS_EVERY = 0.25
_LONGEST_LOOK = 1.0  # a launcher that stood still itself has seen nobody stand still
_START_FACTOR = 4  # reading, compiling and the first collectives take longer than a step
_GRACE_SECONDS = 10.0  # for ranks to end by themselves once another has
_REPORT_SECONDS = 2.0  # for ranks to write down where they are


Ranks = dict[int, psutil.Process]  # those alive, by their number on this node


class Watch:
    """Over one round of workers; `hang` says in a line who stood still, if anybody did."""

    def __init__(
        self,
        folder: Path,
        launch: LaunchConfig,
        pids: Callable[[], dict[int, int]],
        nodes: Nodes | None = None,
        number: int = 0,
    ) -> None:
        """Over the processes `pids` of a node, once there are some.

        `folder` is where workers leave what they say; `number` is the round's, for other nodes.
        """
        assert launch.nproc_per_node is not None
        self.hang = ""
        self.failed_at: float | None = None  # when the first of them was missed
        self.follows = False  # whether it ended ranks only because those of another node failed
        self._folder, self._pids, self._nodes, self._number = folder, pids, nodes, number
        self._count = launch.nproc_per_node
        self._first_rank = (0 if nodes is None else nodes.place()[0]) * self._count
        self._limit, self._timeout = launch.hang_timeout or launch.timeout / 2, launch.timeout
        self._beats = [Beat(0, None, waits=False, place="")] * self._count
        self._still = [0.0] * self._count  # seconds that each was seen at the same beat
        self._since: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        make_pages(folder / PAGES, self._count)
        self._pages = (folder / PAGES).open("rb")  # also once somebody has tidied up there

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._pages.close()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._done.wait(_LOOKS_EVERY):
            passed, looked = time.monotonic() - looked, time.monotonic()
            ranks = _alive(self._pids())
            self._look(min(passed, _LONGEST_LOOK))
            if not ranks:
                continue
            is_whole = len(ranks) == self._count
            if not is_whole:
                self.failed_at = self.failed_at or time.time()
            late = is_whole and any(map(self._is_late, range(self._count)))
            if late or self._hangs_elsewhere():
                self._end_hang(ranks)
                return
            died = self._lasts("died", not is_whole)
            follows = self._lasts("elsewhere", self._fails_elsewhere())
            if (died or follows) and not any(map(self._has_moved, ranks)):
                self.follows = not died
                _kill(ranks)  # stopped, or deaf: the agent's own patience is longer

    def _look(self, passed: float) -> None:
        """At all ranks, so many seconds after the last look."""
        beats = read_beats(self._pages)
        for local, beat in enumerate(beats):
            moved = beat.count != self._beats[local].count or beat.place == FINISHING
            self._still[local] = 0.0 if moved else self._still[local] + passed
        self._beats = beats

    def _has_moved(self, local: int) -> bool:
        """Whether it does something yet, such as to complete a checkpoint."""
        return self._beats[local].count > 0 and self._still[local] < _GRACE_SECONDS

    def _hangs_elsewhere(self) -> bool:
        return self._nodes is not None and self._nodes.hangs_elsewhere(self._number)

    def _fails_elsewhere(self) -> bool:
        return self._nodes is not None and self._nodes.has_failed_elsewhere(self._number)

    def _is_late(self, local: int) -> bool:
        return self._still[local] > self._limit_of(local)

    def _limit_of(self, local: int) -> float:
        """Seconds without a beat after which a rank hangs.

        Once it has read what it begins with, collectives run, and NCCL's watchdog would end the
        process after `launch.timeout` without naming anybody.
        """
        beat = self._beats[local]
        if beat.step is not None and beat.place != READING:
            return self._limit
        slow = self._limit * _START_FACTOR
        return slow if beat.place in (READING, LOADING, "") else min(slow, 0.8 * self._timeout)

    def _lasts(self, what: str, is_so: bool) -> bool:
        """Whether it has been so for longer than others have time to end by themselves."""
        if not is_so:
            self._since.pop(what, None)
            return False
        return time.monotonic() - self._since.setdefault(what, time.monotonic()) > _GRACE_SECONDS

    def _end_hang(self, ranks: Ranks) -> None:
        """Have all ranks write down where they are, compare, and end them."""
        own = self._states(ranks)
        states = own if self._nodes is None else self._nodes.share_states(self._number, own)
        limit = max(map(self._limit_of, range(self._count)))
        self.hang = report(states, limit, is_usual=limit == self._limit)
        self.failed_at = time.time()
        _kill(ranks)

    def _states(self, ranks: Ranks) -> list[RankState]:
        with contextlib.suppress(OSError):  # a full disk is no reason to let them hang
            (self._folder / ASK).touch()
        for local, each in ranks.items():
            if self._beats[local].count:  # before that it would die of it
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
            said = (self._folder / f"{ASK}-{index}").read_bytes()
            found = msgspec.json.decode(said, type=Recorded)
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
