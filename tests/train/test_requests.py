"""What one rank hears all ranks heed, at the same place and in time."""

import os
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from fsdpctl.config.model_path import RUN_CONFIG
from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.open import open_data
from fsdpctl.plan.batch import plan_batches
from fsdpctl.train import requests
from fsdpctl.train.assemble import make_model
from fsdpctl.train.generate import Sampling, generate
from fsdpctl.train.kept import KeptFiles
from fsdpctl.train.looks import Hearing
from fsdpctl.train.loss import validation_loss
from fsdpctl.train.requests import SAVE, STOP, Asked, Requests, TimeLimit, early_request
from tests.distributed import distributed
from tests.train.ranks import CPU, resolved, words

BEFORE = 1e9  # nanoseconds


def test_what_is_asked_survives_being_flags():
    for name in Asked.__dataclass_fields__:
        asked = Asked(**{name: True})
        assert Asked(*asked.flags) == asked
        assert (Asked() | asked, asked | Asked()) == (asked, asked)
        assert asked.ends == (name not in ("save", "profile"))


# ---- the clock -------------------------------------------------------------------------------


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0 + seconds)


def test_it_is_time_to_stop_when_two_steps_and_three_saves_are_left(monkeypatch):
    limit = TimeLimit(100.0, 1000.0, longest_save=3.0)
    limit.step_took(40.0)  # which compiles
    for seconds, is_near in ((76.9, False), (77.0, True)):
        at(monkeypatch, seconds)
        assert limit.is_near(7.0) == is_near
    for seconds in (1.0, 2.0, 1.5):
        limit.step_took(seconds)
    limit.save_took(5.0)
    for seconds, is_near in ((80.9, False), (81.0, True)):
        at(monkeypatch, seconds)
        assert limit.is_near(1.9) == is_near
    limit.save_took(1.0)
    assert limit.is_near()


def test_without_a_limit_there_is_no_end(monkeypatch):
    limit = TimeLimit(None, 1000.0, 0.0)
    at(monkeypatch, 1e12)
    assert not limit.is_near()


def test_a_start_ends_when_its_time_is_over_or_a_stop_is_new(tmp_path, monkeypatch):
    (tmp_path / RUN_CONFIG).touch()
    at(monkeypatch, 50)
    assert early_request(tmp_path, 51.0, 1000.0) is None
    assert early_request(tmp_path, 50.0, 1000.0) == "launch.time_limit=50 is over"
    touch(tmp_path / STOP, -BEFORE)
    assert early_request(tmp_path, None, 1000.0) is None
    touch(tmp_path / STOP, BEFORE)
    assert early_request(tmp_path, None, 1000.0) == f"{tmp_path / STOP} was there"
    assert not (tmp_path / STOP).exists()


# ---- files -----------------------------------------------------------------------------------


def touch(path: Path, later: float) -> None:
    """With a time so many nanoseconds after that of the run's configuration."""
    path.touch()
    when = (path.parent / RUN_CONFIG).stat().st_mtime_ns + int(later)
    os.utime(path, ns=(when, when))


def heard_in(folder: Path, *, is_main: bool = True) -> Requests:
    (folder / RUN_CONFIG).touch()
    limit = TimeLimit(None, 0.0, 0.0) if is_main else None
    return Requests(folder, KeptFiles(Config(), folder, None), limit)


def test_a_file_is_looked_for_once_a_second_and_said_once(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heard = heard_in(tmp_path)
    touch(tmp_path / SAVE, BEFORE)
    assert heard.look(by_signal=False) == Asked()  # it has just looked
    now += 1.0
    assert heard.look(by_signal=True) == Asked(by_signal=True, save=True)
    now += 1.0
    assert heard.look(by_signal=False) == Asked()
    heard.done(SAVE)
    assert not (tmp_path / SAVE).exists()
    touch(tmp_path / SAVE, BEFORE)
    now += 1.0
    assert heard.look(by_signal=False) == Asked(save=True)


def test_what_cannot_be_removed_does_not_ask_for_ever(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heard = heard_in(tmp_path)
    (tmp_path / SAVE).mkdir()
    now += 1.0
    assert heard.look(by_signal=False).save
    heard.done(SAVE)
    now += 1.0
    assert not heard.look(by_signal=False).save


def test_other_ranks_leave_files_alone(tmp_path, monkeypatch):
    heard = heard_in(tmp_path, is_main=False)
    monkeypatch.setattr(requests, "_LOOKS_EVERY", 0.0)
    touch(tmp_path / STOP, -BEFORE)
    assert heard.look(by_signal=False) == Asked()
    assert heard.remove_left_over() == heard.end() == []
    assert (tmp_path / STOP).exists()


def test_only_what_is_older_than_the_start_is_left_over(tmp_path):
    heard = heard_in(tmp_path)
    touch(tmp_path / STOP, -BEFORE)
    touch(tmp_path / SAVE, BEFORE)
    assert heard.remove_left_over() == ["STOP was left from before this start; removed"]
    assert not (tmp_path / STOP).exists()
    assert heard.end() == ["SAVE came when there was nothing left to do; removed"]
    assert not (tmp_path / SAVE).exists()


# ---- between the steps -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@distributed()
def test_a_validation_ends_on_all_ranks_after_the_same_batch(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    own = tmp_path / str(rank)
    own.mkdir()
    config = resolved(words(own, world_size, "data.val_fraction=0.2"))
    data, model = open_data(config.data), make_model(config, CPU)
    assert data.val is not None
    plan = plan_batches(12, world_size)
    batches = Batches(data.val.rows(config.train.seq_len), plan, 0, data.vocab_size)
    for lag in (0, 1):
        seen = 0

        def look() -> Asked:
            return Asked(by_signal=rank == world_size - 1 and seen == 3, save=rank == 0)  # noqa: B023

        hearing = Hearing(look, model.collectives, CPU, lag)

        def goes_on(number: int) -> bool:
            nonlocal seen
            seen = number
            return hearing.goes_on()  # noqa: B023

        about: dict[str, Any] = {"at_most": 0, "chunk_tokens": 0}
        loss = validation_loss(model, batches, model.collectives, CPU, **about, goes_on=goes_on)
        assert (loss, seen) == (None, 3 + lag)
        assert hearing.all_heard() == Asked(by_signal=True, save=True)
        whole = validation_loss(model, batches, model.collectives, CPU, **about)
        assert whole is not None


@distributed(world_size=2)
def test_a_sample_ends_on_all_ranks_after_the_same_token(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    own = tmp_path / str(rank)
    own.mkdir()
    config = resolved(words(own, world_size))
    model = make_model(config, CPU)
    drawn = 0

    def look() -> Asked:
        nonlocal drawn
        drawn += 1
        return Asked(by_file=rank == 0 and drawn == 5)

    hearing = Hearing(look, model.collectives, CPU)
    turns = takewhile(lambda turn: hearing.goes_on(), range(20))
    about: dict[str, Any] = {"context": 16, "sampling": Sampling(0), "device": CPU}
    tokens = generate(model, [1], turns, **about)
    assert len(tokens) == 4
    assert hearing.heard == Asked(by_file=True)
    whole = generate(model, [1], range(20), **about)
    assert whole[:4] == tokens
