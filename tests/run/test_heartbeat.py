"""The sign of life in alive.json."""

import os
import shutil
import time
from collections.abc import Callable

from fsdpctl.run.files import ALIVE
from fsdpctl.run.heartbeat import Heartbeat, read_sign


def wait_for(what: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_is_given_while_nothing_happens(tmp_path):
    heartbeat = Heartbeat(tmp_path, every=0.01)
    first = read_sign(tmp_path)
    assert first is not None
    assert (first.pid, first.step, first.is_of_this_host) == (os.getpid(), None, True)

    def is_later() -> bool:
        sign = read_sign(tmp_path)  # whole, whenever it is looked at
        assert sign is not None
        return sign.time > first.time + 0.05

    wait_for(is_later)
    heartbeat.end("ended")


def test_it_has_the_step_and_how_long_one_takes(tmp_path):
    heartbeat = Heartbeat(tmp_path, every=1000)
    heartbeat.step(10)
    first = read_sign(tmp_path)
    assert first is not None
    assert (first.step, first.seconds_per_step) == (10, None)
    time.sleep(0.02)
    heartbeat.step(12)
    heartbeat.end("failed", "x" * 10_000)
    sign = read_sign(tmp_path)
    assert sign is not None
    assert (sign.step, sign.state, len(sign.message)) == (12, "failed", 2000)
    assert sign.seconds_per_step is not None
    assert 0.01 <= sign.seconds_per_step < 10


def test_it_goes_back_with_the_run(tmp_path):
    heartbeat = Heartbeat(tmp_path, every=1000)
    heartbeat.step(10)
    heartbeat.step(20)
    heartbeat.go_back(12)
    heartbeat.end("stopped")
    sign = read_sign(tmp_path)
    assert sign is not None
    assert (sign.step, sign.seconds_per_step) == (12, None)


def test_after_the_end_there_is_no_more(tmp_path):
    heartbeat = Heartbeat(tmp_path, every=0.01)
    heartbeat.end("stopped")
    (tmp_path / ALIVE).unlink()
    time.sleep(0.1)
    assert read_sign(tmp_path) is None


def test_a_folder_that_goes_and_comes_ends_nothing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    heartbeat = Heartbeat(run, every=0.01)
    shutil.rmtree(run, ignore_errors=True)
    time.sleep(0.05)
    run.mkdir(exist_ok=True)
    wait_for((run / ALIVE).exists)
    heartbeat.end("ended")
