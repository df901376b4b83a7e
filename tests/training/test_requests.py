"""All ranks act on the request to one rank, at the same point and in time."""

import os
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from fsdpctl.data.batches import Batches
from fsdpctl.data.open_data import open_data
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.run_files import RUN_CONFIG, SAVE, STOP
from fsdpctl.plan.batch_plan import plan_batches
from fsdpctl.training import requests
from fsdpctl.training.assemble import make_model
from fsdpctl.training.callbacks.generation import Sampling, generate
from fsdpctl.training.requests import (
    RequestCollector,
    RequestFlags,
    RequestSync,
    TimeLimit,
    take_stop_reason,
)
from fsdpctl.training.validation_loss import validation_loss
from tests.distributed import distributed
from tests.matrix import fast
from tests.training.ranks import CPU, resolved, run_args

BEFORE = 1e9  # nanoseconds


def test_requests_survive_the_exchange_as_flags():
    for name in RequestFlags.__dataclass_fields__:
        flags = RequestFlags(**{name: True})
        assert RequestFlags(*flags.flags) == flags
        assert (RequestFlags() | flags, flags | RequestFlags()) == (flags, flags)
        assert flags.stops == (name not in ("save", "profile"))


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0 + seconds)


def test_the_time_limit_leaves_two_steps_and_three_saves(monkeypatch):
    limit = TimeLimit(100.0, 1000.0, longest_save_seconds=3.0)
    limit.add_step(40.0)  # which compiles
    for seconds, is_near in ((76.9, False), (77.0, True)):
        at(monkeypatch, seconds)
        assert limit.is_near(7.0) == is_near
    for seconds in (1.0, 2.0, 1.5):
        limit.add_step(seconds)
    limit.add_save(5.0)
    for seconds, is_near in ((80.9, False), (81.0, True)):
        at(monkeypatch, seconds)
        assert limit.is_near(1.9) == is_near
    limit.add_save(1.0)
    assert limit.is_near()


def test_without_a_limit_there_is_no_stop(monkeypatch):
    limit = TimeLimit(None, 1000.0, 0.0)
    at(monkeypatch, 1e12)
    assert not limit.is_near()


def test_a_start_stops_at_its_time_limit_or_on_a_new_stop_file(tmp_path, monkeypatch):
    (tmp_path / RUN_CONFIG).touch()
    at(monkeypatch, 50)
    assert take_stop_reason(tmp_path, 51.0, 1000.0) is None
    assert take_stop_reason(tmp_path, 50.0, 1000.0) == "launch.time_limit=50 exceeded"
    touch(tmp_path / STOP, -BEFORE)
    assert take_stop_reason(tmp_path, None, 1000.0) is None
    touch(tmp_path / STOP, BEFORE)
    assert take_stop_reason(tmp_path, None, 1000.0) == f"requested by {tmp_path / STOP}"
    assert not (tmp_path / STOP).exists()


def touch(path: Path, later: float) -> None:
    """Create a file `later` nanoseconds after the run's configuration."""
    path.touch()
    when = (path.parent / RUN_CONFIG).stat().st_mtime_ns + int(later)
    os.utime(path, ns=(when, when))


def collector(folder: Path, *, is_main: bool = True, by_signal: bool = False) -> RequestCollector:
    (folder / RUN_CONFIG).touch()
    return RequestCollector(
        folder, TimeLimit(None, 0.0, 0.0), is_rank_0=is_main, stop_requested=lambda: by_signal,
        before_poll=lambda: None,
    )  # fmt: skip


def test_a_signal_and_the_check_of_the_directory_do_not_depend_on_files(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "_POLL_SECONDS", 0.0)
    for is_main in (True, False):
        signalled = collector(tmp_path, is_main=is_main, by_signal=True)
        assert signalled.poll() == RequestFlags(stop_by_signal=True)

    def missing() -> None:
        raise FsdpctlError("deleted")

    checked = collector(tmp_path)
    monkeypatch.setattr(checked, "_before_poll", missing)
    with pytest.raises(FsdpctlError, match="deleted"):
        checked.poll()


def test_files_are_looked_for_once_a_second_and_reported_once(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    result = collector(tmp_path)
    touch(tmp_path / SAVE, BEFORE)
    assert result.poll() == RequestFlags()  # it has just polled
    now += 1.0
    assert result.poll() == RequestFlags(save=True)
    now += 1.0
    assert result.poll() == RequestFlags()
    result.clear(SAVE)
    assert not (tmp_path / SAVE).exists()
    touch(tmp_path / SAVE, BEFORE)
    now += 1.0
    assert result.poll() == RequestFlags(save=True)


def test_a_file_that_cannot_be_removed_is_one_request(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    result = collector(tmp_path)
    (tmp_path / SAVE).mkdir()
    now += 1.0
    assert result.poll().save
    result.clear(SAVE)
    now += 1.0
    assert not result.poll().save


def test_other_ranks_ignore_files(tmp_path, monkeypatch):
    result = collector(tmp_path, is_main=False)
    monkeypatch.setattr(requests, "_POLL_SECONDS", 0.0)
    touch(tmp_path / STOP, -BEFORE)
    assert result.poll() == RequestFlags()
    assert result.remove_stale(at_end=False) == result.remove_stale(at_end=True) == []
    assert (tmp_path / STOP).exists()


def test_only_files_older_than_the_start_are_left_over(tmp_path):
    result = collector(tmp_path)
    touch(tmp_path / STOP, -BEFORE)
    touch(tmp_path / SAVE, BEFORE)
    assert result.remove_stale(at_end=False) == ["STOP: request removed (from before this start)"]
    assert not (tmp_path / STOP).exists()
    assert result.remove_stale(at_end=True) == ["SAVE: request removed (came after the last step)"]
    assert not (tmp_path / SAVE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", fast(3, slow=[2]))
@distributed()
def test_a_validation_ends_on_all_ranks_after_the_same_batch(rank, world_size, tmp_path):
    folder = tmp_path / str(rank)
    folder.mkdir()
    config = resolved(run_args(folder, world_size, "data.val_fraction=0.2"))
    data, model = open_data(config.data), make_model(config, CPU)
    assert data.val is not None
    plan = plan_batches(12, world_size)
    batches = Batches(data.val.samples(config.train.seq_len), plan, 0, data.vocab_size)
    for lag in (0, 1):
        seen = 0

        def look() -> RequestFlags:
            return RequestFlags(stop_by_signal=rank == world_size - 1 and seen == 3, save=rank == 0)  # noqa: B023

        sync = RequestSync(look, model.collectives, CPU, lag)

        def should_continue(number: int) -> bool:
            nonlocal seen
            seen = number
            return sync.should_continue()  # noqa: B023

        options: dict[str, Any] = {"at_most": 0, "chunk_tokens": 0}
        loss = validation_loss(
            model, batches, model.collectives, CPU, **options, should_continue=should_continue
        )
        assert (loss, seen) == (None, 3 + lag)
        assert sync.complete() == RequestFlags(stop_by_signal=True, save=True)
        assert validation_loss(model, batches, model.collectives, CPU, **options) is not None


@distributed(world_size=2)
def test_a_sample_ends_on_all_ranks_after_the_same_token(rank, world_size, tmp_path):
    folder = tmp_path / str(rank)
    folder.mkdir()
    model = make_model(resolved(run_args(folder, world_size)), CPU)
    drawn = 0

    def look() -> RequestFlags:
        nonlocal drawn
        drawn += 1
        return RequestFlags(stop_by_file=rank == 0 and drawn == 5)

    sync = RequestSync(look, model.collectives, CPU)
    turns = takewhile(lambda turn: sync.should_continue(), range(20))
    options: dict[str, Any] = {"context": 16, "sampling": Sampling(0), "device": CPU}
    tokens = list(generate(model, [1], turns, **options))
    assert (len(tokens), sync.received) == (4, RequestFlags(stop_by_file=True))
    assert list(generate(model, [1], range(20), **options))[:4] == tokens
