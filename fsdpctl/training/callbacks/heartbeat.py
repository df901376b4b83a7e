"""The thread of rank 0 that writes heartbeat.json."""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdpctl.comm.mesh import ObjectExchange
from fsdpctl.io import files
from fsdpctl.io.run_files import HEARTBEAT
from fsdpctl.run.heartbeat import DONE, FAILED, INTERVAL_S, STOPPED, HeartbeatRecord, pid_namespace
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.training.trainer import Callback, Trainer, ends_together

_LONGEST_MESSAGE = 2000  # characters


class Heartbeat(Callback):
    """A callback with a thread on rank 0 that writes heartbeat.json, even if training hangs.

    A failure to write is ignored: readers notice the age of the last heartbeat.
    """

    def __init__(
        self, run_dir: Path, ranks: ObjectExchange, *, is_on: bool = True, every: float = INTERVAL_S
    ) -> None:
        """Write the first heartbeat and start the thread, if `is_on`.

        Other threads, such as that of a save, must not use the collectives of `ranks`: `end`
        does, while a save may be in progress.
        """
        self._path, self._ranks, self._is_on, self._every = run_dir / HEARTBEAT, ranks, is_on, every
        self._fields: dict[str, Any] = {"namespace": pid_namespace()}
        self._first: tuple[int, float] | None = None  # the first step, and when it was completed
        self._has_ended = threading.Event()
        self._writing = threading.Lock()
        if is_on:
            self._write()
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        step, now = metrics.step, time.monotonic()
        is_first = self._first is None
        if self._first is None:
            self._first = step, now
        first, began = self._first
        seconds = (now - began) / (step - first) if step > first else None
        self._fields = {**self._fields, "step": step, "seconds_per_step": seconds}
        if is_first:  # `fsdpctl status` shows at once that training has started
            self._write()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Record the end.

        Ranks that end at the same step synchronize first.
        """
        if ends_together(error):
            self._ranks.all_gather_values(0)
            state, message = DONE if error is None else STOPPED, str(error or "")
        else:
            state, message = FAILED, f"{type(error).__name__}: {error}"
        self._has_ended.set()
        self._fields = {**self._fields, "state": state, "message": message[:_LONGEST_MESSAGE]}
        self._write()

    def _run(self) -> None:
        while not self._has_ended.wait(self._every):
            self._write(is_periodic=True)

    def _write(self, *, is_periodic: bool = False) -> None:
        if self._is_on:
            with self._writing, contextlib.suppress(OSError):
                if is_periodic and self._has_ended.is_set():
                    return  # the last heartbeat was written while this call waited for the lock
                host, now = socket.gethostname(), time.time()
                record = HeartbeatRecord(host, os.getpid(), now, **self._fields)
                files.write_atomic(self._path, json.dumps(asdict(record)) + "\n")
