"""What goes on beside a run's training, on all its ranks."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.config.output import CheckpointConfig
from fsdpctl.config.schema import Config
from fsdpctl.errors import NonFiniteError, StoppedError
from fsdpctl.run.files import ALIVE, ENVIRONMENT, LOGS, METRICS
from fsdpctl.run.heartbeat import read_sign
from fsdpctl.run.metrics import MetricsFile
from fsdpctl.run.starts import read_starts
from fsdpctl.train.run_watch import RunWatch
from tests.checkpoint.test_saver import fake_checkpoints
from tests.distributed import distributed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("raising", "state", "message"),
    [
        (None, "ended", ""),
        (StoppedError("stopped at step 7"), "stopped", "stopped at step 7"),
        (NonFiniteError("step 7: loss nan"), "stopped", "step 7: loss nan"),
    ],
)
@distributed(world_size=2)
def test_ranks_end_together_once_the_command_is_done(
    rank: int,
    world_size: int,
    raising: Exception | None,
    state: str,
    message: str,
    tmp_path: Path,
) -> None:
    config = replace(Config(), checkpoint=CheckpointConfig(after_save="test -d"))
    (tmp_path / LOGS).mkdir(exist_ok=True)
    watch = RunWatch(config, tmp_path, ObjectExchange(), CPU, is_on=True)
    record = MetricsFile(tmp_path / METRICS, 0, watch.line) if rank == 0 else None
    caught = None
    done = threading.Event()

    def then() -> None:
        time.sleep(0.5)
        done.set()

    began = time.monotonic()
    try:
        with watch.over(0, lambda line: None, record):
            if record is not None:
                record.write({"step": 7, "loss": 1.0})
                folder = fake_checkpoints(tmp_path / "checkpoints", 7)[0]
                watch.after_save.add(folder, 7, then)
            if raising is not None:
                raise raising
    except Exception as error:
        caught = error
    assert caught is raising
    assert time.monotonic() - began >= 0.5
    if rank == 0:
        assert done.is_set()
        sign = read_sign(tmp_path)
        assert sign is not None
        assert (sign.state, sign.message, sign.step) == (state, message, 7)
        assert record is not None
        record.close()
        lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
        assert [line.get("after_save") for line in lines] == [None, "done"]
        (start,) = read_starts(tmp_path)
        assert (start["ranks"], start["devices"]) == (2, {"cpu": 2})


@distributed(world_size=2)
def test_a_rank_that_fails_alone_waits_for_nobody(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    watch = RunWatch(Config(), tmp_path, ObjectExchange(), CPU, is_on=True)
    if rank == 1:
        return
    with pytest.raises(RuntimeError), watch.over(0, lambda line: None, None):
        raise RuntimeError("planted")
    sign = read_sign(tmp_path)
    assert sign is not None
    assert (sign.state, sign.message) == ("failed", "RuntimeError: planted")


def test_where_only_steps_are_measured_nothing_is_left(tmp_path):
    config = replace(Config(), checkpoint=CheckpointConfig(after_save="no such program"))
    RunWatch(config, tmp_path, ObjectExchange(), CPU, is_on=False)
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_fails_is_said_and_on_record(tmp_path, monkeypatch):
    def fail(run_dir: Path, step: int) -> Any:
        raise ValueError("no room")

    monkeypatch.setattr("fsdpctl.train.loggers._TensorBoard", fail)
    config = replace(Config(), log=replace(Config().log, tensorboard=True))
    watch = RunWatch(config, tmp_path, ObjectExchange(), CPU, is_on=True)
    record = MetricsFile(tmp_path / METRICS, 5, watch.line)
    said: list[str] = []
    with watch.over(5, said.append, record):
        record.write({"step": 6, "loss": 1.0})
    record.close()
    warning = "log.tensorboard: no room; the run goes on without it"
    assert said == [warning]
    first, _ = (tmp_path / METRICS).read_text().splitlines()
    assert json.loads(first) == {"step": 5, "warning": warning}
    assert {ALIVE, ENVIRONMENT} <= {each.name for each in tmp_path.iterdir()}


def test_want_of_memory_is_kept_whenever_it_comes(tmp_path, monkeypatch):
    dumped: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dumped.append)
    watch = RunWatch(Config(), tmp_path, ObjectExchange(), CPU, is_on=True)
    with (
        pytest.raises(torch.OutOfMemoryError, match="memory-snapshot-rank-00000.bin"),
        watch.over(0, lambda line: None, None),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    sign = read_sign(tmp_path)
    assert sign is not None
    assert dumped[0] in sign.message
