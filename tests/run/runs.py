"""Makes run directories like those of a run, without a run."""

import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.run_checkpoints import step_folder
from fsdpctl.io.run_files import CHECKPOINTS, HEARTBEAT, LOGS, METRICS, RUN_CONFIG
from fsdpctl.run.heartbeat import HeartbeatRecord
from tests.hostile import make_checkpoint

LONG_AGO = 1e9  # a time before any run
REJECTED: dict[str, Any] = {
    "reason": "x", "samples": [0], "rank_samples": [0], "rank": 0, "threshold": None, "loss": 1,
    "grad_norm": 1, "action": "skip",
}  # fmt: skip


def make_run(folder: Path, *, steps: int = 100, done: int = 0) -> Path:
    """Make the directory of a run of `steps`, of which `done` are completed."""
    (folder / LOGS).mkdir(parents=True)
    (folder / CHECKPOINTS).mkdir()
    (folder / RUN_CONFIG).write_text(f"train.steps: {steps}\n")
    os.utime(folder / RUN_CONFIG, (1e9, 1e9))
    write_lines(folder, *(step_line(step) for step in range(1, done + 1)))
    return folder


def step_line(step: int, **kwargs: Any) -> dict[str, Any]:
    line = {
        "step": step, "loss": 1.0 / step, "grad_norm": 1.0, "tokens_per_second": 100.0 * step,
        "seconds": 0.5, "mfu": None, "peak_allocated_bytes": None, "peak_reserved_bytes": 1 << 20,
    }  # fmt: skip
    return {**line, **kwargs}


def write_lines(run: Path, *lines: dict[str, Any]) -> None:
    with (run / METRICS).open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def save(run: Path, step: int) -> Path:
    """Make a checkpoint of the run."""
    return make_checkpoint(step_folder(run / CHECKPOINTS, step))


def write_heartbeat(run: Path, **kwargs: Any) -> HeartbeatRecord:
    """Write a heartbeat of this process, except for `about`."""
    record = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "step": 1}
    heartbeat = HeartbeatRecord(**{**record, **kwargs})
    (run / HEARTBEAT).write_text(json.dumps(asdict(heartbeat)))
    return heartbeat
