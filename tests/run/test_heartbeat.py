"""The heartbeat in heartbeat.json."""

import os
import shutil
import time
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

from fsdpctl.comm.mesh import ObjectExchange
from fsdpctl.errors import StoppedError
from fsdpctl.io.run_files import HEARTBEAT
from fsdpctl.run.heartbeat import read_heartbeat
from fsdpctl.run.step_metrics import StepMetrics
from fsdpctl.training.callbacks.heartbeat import Heartbeat
from fsdpctl.training.trainer import Trainer
from tests.commands.test_interruptions import wait_for

RANKS, RUN = cast(ObjectExchange, Mock()), cast(Trainer, None)


def done(step: int) -> StepMetrics:
    return cast(StepMetrics, SimpleNamespace(step=step))


def test_heartbeats_are_written_while_nothing_happens(tmp_path):
    heartbeat = Heartbeat(tmp_path, RANKS, every=0.01)
    first = read_heartbeat(tmp_path)
    assert first is not None
    assert (first.pid, first.step, first.is_alive) == (os.getpid(), None, True)

    def is_later() -> bool:
        record = read_heartbeat(tmp_path)  # complete at every read
        assert record is not None
        return record.time > first.time + 0.05

    wait_for(is_later)
    heartbeat.end(RUN, None)


def test_a_heartbeat_has_the_step_and_the_time_per_step(tmp_path):
    heartbeat = Heartbeat(tmp_path, RANKS, every=1000)
    heartbeat.on_step(RUN, done(10))
    first = read_heartbeat(tmp_path)
    assert first is not None
    assert (first.step, first.seconds_per_step) == (10, None)
    time.sleep(0.02)
    heartbeat.on_step(RUN, done(12))
    heartbeat.end(RUN, RuntimeError("x" * 10_000))
    record = read_heartbeat(tmp_path)
    assert record is not None
    assert (record.step, record.state, len(record.message)) == (12, "failed", 2000)
    assert record.seconds_per_step is not None
    assert 0.01 <= record.seconds_per_step < 10


def test_after_the_end_there_is_no_more(tmp_path):
    Heartbeat(tmp_path, RANKS, every=0.01).end(RUN, StoppedError("asked"))
    (tmp_path / HEARTBEAT).unlink()
    time.sleep(0.1)
    assert read_heartbeat(tmp_path) is None


def test_a_folder_that_goes_and_comes_ends_nothing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    heartbeat = Heartbeat(run, RANKS, every=0.01)
    shutil.rmtree(run, ignore_errors=True)
    time.sleep(0.05)
    run.mkdir(exist_ok=True)
    wait_for((run / HEARTBEAT).exists)
    heartbeat.end(RUN, None)
