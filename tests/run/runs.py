"""Run directories as a run leaves them, without a run."""

import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.folders import step_folder
from fsdpctl.config.model_path import CHECKPOINTS, RUN_CONFIG
from fsdpctl.run.files import ALIVE, LOGS, METRICS
from fsdpctl.run.heartbeat import Sign, namespace_here
from tests.hostile import make_checkpoint

GONE = (1 << 22) - 1  # a process id that the kernel gives last


def make_run(folder: Path, *, steps: int = 100, done: int = 0) -> Path:
    """A run of `steps`, of which `done` are written down."""
    (folder / LOGS).mkdir(parents=True)
    (folder / CHECKPOINTS).mkdir()
    (folder / RUN_CONFIG).write_text(f"train.steps: {steps}\n")
    os.utime(folder / RUN_CONFIG, (1e9, 1e9))
    write_lines(folder, *(step_line(step) for step in range(1, done + 1)))
    return folder


def step_line(step: int, **about: Any) -> dict[str, Any]:
    line = {
        "step": step, "loss": 1.0 / step, "grad_norm": 1.0, "tokens_per_second": 100.0 * step,
        "seconds": 0.5, "mfu": None, "peak_allocated_bytes": None, "peak_reserved_bytes": 1 << 20,
    }  # fmt: skip
    return {**line, **about}


def write_lines(run: Path, *lines: dict[str, Any]) -> None:
    with (run / METRICS).open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def save(run: Path, step: int) -> Path:
    """A checkpoint of the run."""
    return make_checkpoint(step_folder(run / CHECKPOINTS, step))


def write_sign(run: Path, **about: Any) -> Sign:
    """A sign of life of this very process, but for what is said."""
    now = time.time()
    sign = {
        "host": socket.gethostname(), "pid": os.getpid(), "namespace": namespace_here(),
        "began": now, "time": now, "step": 1,
    }  # fmt: skip
    made = Sign(**{**sign, **about})
    (run / ALIVE).write_text(json.dumps(asdict(made)))
    return made
