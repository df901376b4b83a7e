"""The writer of heartbeat.json, and the common end of all ranks."""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.io import files
from fsdpctl.run.files import HEARTBEAT
from fsdpctl.run.heartbeat import ENDED, FAILED, INTERVAL, STOPPED, HeartbeatRecord, pid_namespace
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.train.callback import Callback, is_joint

if TYPE_CHECKING:
    from fsdpctl.train.trainer import Trainer

_LONGEST = 2000  # characters of a message


class Heartbeat(Callback):
    """A thread of rank 0 that writes heartbeat.json until the process ends, whatever training does.

    A failure to write is ignored: readers then see the age of the last heartbeat.
    """

    def __init__(
        self, run_dir: Path, ranks: ObjectExchange, *, is_on: bool = True, every: float = INTERVAL
    ) -> None:
        """Write the first heartbeat and start the thread, if this rank `is_on`."""
        self._path, self._ranks, self._is_on, self._every = run_dir / HEARTBEAT, ranks, is_on, every
        now = time.time()
        pid, namespace = os.getpid(), pid_namespace()
        self._record = HeartbeatRecord(socket.gethostname(), pid, namespace, now, now)
        self._first: tuple[int, float] | None = None  # the first step, and when it was completed
        self._has_ended = threading.Event()
        self._writing = threading.Lock()
        if is_on:
            self._write()
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step(self, run: "Trainer", done: StepMetrics) -> None:
        """Record a completed step."""
        self._set(done.step)

    def went_back(self, run: "Trainer", step: int) -> None:
        """Record the step that the run resumes from, and measure the time per step again."""
        self._first = None
        self._set(step)

    def end(self, run: "Trainer", error: BaseException | None) -> None:
        """Record the end. Ranks that end together first wait for rank 0, and time out otherwise."""
        if is_joint(error):
            self._ranks.gather_objects(0)
            state, message = ENDED if error is None else STOPPED, str(error or "")
        else:
            state, message = FAILED, f"{type(error).__name__}: {error}"
        self._has_ended.set()
        self._record = replace(self._record, state=state, message=message[:_LONGEST])
        self._write()

    def _set(self, step: int) -> None:
        now = time.monotonic()
        is_first = self._first is None
        if self._first is None:
            self._first = step, now
        first, began = self._first
        each = (now - began) / (step - first) if step > first else None
        self._record = replace(self._record, step=step, seconds_per_step=each)
        if is_first:  # readers shall see at once that the run is no longer starting
            self._write()

    def _run(self) -> None:
        while not self._has_ended.wait(self._every):
            self._write()

    def _write(self) -> None:
        if self._is_on:
            with self._writing, contextlib.suppress(OSError):
                record = replace(self._record, time=time.time())
                files.replace(self._path, json.dumps(asdict(record)) + "\n")
