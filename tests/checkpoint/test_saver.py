"""Saves during training, and saves that the disk refuses."""

import resource
import shutil
import signal
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fsdpctl.checkpoint import manifest
from fsdpctl.checkpoint.manifest import BaseInfo
from fsdpctl.checkpoint.publish import space_problem
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import (
    complete_checkpoints,
    describe_incomplete,
    describe_incomplete_in,
    find_checkpoint,
    newest_checkpoint,
    remove_expired,
    step_folder,
)
from fsdpctl.comm.rank_status import STATUS_PAGE
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.io.run_files import CHECKPOINTS, LATEST, MANIFEST
from fsdpctl.training.callbacks import checkpoints
from tests.checkpoint.test_killed_saves import MODES, make_saver, run_at
from tests.checkpoint.test_killed_saves import save as save_now
from tests.checkpoint.test_round_trip import read_everything, train_on, trained, whole_tensors
from tests.distributed import distributed


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@distributed(world_size=2)
def test_a_checkpoint_has_the_state_of_the_step_it_was_requested_at(
    rank: int, world_size: int, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training changes every weight and state while the thread has not written one."""
    model, optimizer = trained(strategy)
    at_once, later = make_saver(tmp_path, "sync", 0), make_saver(tmp_path, "async", 0)
    save_now(at_once, model, optimizer, 1)
    may_write = threading.Event()
    written = vars(manifest)["write_tensor_file"]

    def write_late(path: Path, header: bytes, chunks: Iterator[memoryview]) -> int:
        assert may_write.wait(30)
        return int(written(path, header, chunks))

    monkeypatch.setattr(manifest, "write_tensor_file", write_late)
    run = run_at(model, optimizer, 2)
    later.save(run)
    train_on(model, optimizer, 2)
    later.idle(run)
    assert later.fraction_written == 0.0
    may_write.set()
    later.complete_save(run)
    assert later.fraction_written is None
    first, second = (whole_tensors(step_folder(tmp_path / CHECKPOINTS, n)) for n in (1, 2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    save_now(later, model, optimizer, 3)
    third = whole_tensors(step_folder(tmp_path / CHECKPOINTS, 3))
    assert not torch.equal(first["model/embed.weight"], third["model/embed.weight"])


@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=2)
def test_a_full_disk_is_an_error_on_every_rank_and_keeps_older_checkpoints(
    rank: int, world_size: int, mode: str, tmp_path: Path
) -> None:
    model, optimizer = trained("full_shard")
    saver = make_saver(tmp_path, mode)
    save_now(saver, model, optimizer, 1)
    if rank == 1:  # the kernel refuses writes beyond this size, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    run = run_at(model, optimizer, 2)
    saver.save(run)
    with pytest.raises(FsdpctlError, match=r"step-00000002: could not be written: rank-00001"):
        saver.complete_save(run)
    names = sorted(each.name for each in (tmp_path / CHECKPOINTS).iterdir())
    assert names == [LATEST, "step-00000001"]
    read_everything(tmp_path / CHECKPOINTS / LATEST)


Usage = namedtuple("Usage", "total used free")


def test_free_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    assert space_problem(tmp_path / "not" / "there", 1 << 20) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 5 << 20))
    assert space_problem(tmp_path, 3 << 20) == ""
    model, optimizer = trained("full_shard")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1 << 20))
    saver = make_saver(tmp_path, "sync")
    run = run_at(model, optimizer, 2)
    saver.save(run)
    with pytest.raises(FsdpctlError, match=r"no space left: [\d,]+ bytes needed, 1,048,576"):
        saver.idle(run)
    assert not list((tmp_path / CHECKPOINTS).iterdir())


def fake_checkpoints(folder: Path, *steps: int) -> list[Path]:
    folders = [step_folder(folder, step) for step in steps]
    for each in folders:
        each.mkdir(parents=True)
        (each / MANIFEST).write_text("{}")
    return folders


@pytest.mark.parametrize("keep, left", [
    (CheckpointConfig(keep_last=2), [50, 60]),
    (CheckpointConfig(keep_last=0), [10, 20, 30, 40, 50, 60]),
    (CheckpointConfig(keep_last=1, keep_every=20), [20, 40, 60]),
    (CheckpointConfig(keep_last=2, keep_every=30), [30, 50, 60]),
    (CheckpointConfig(keep_last=9), [10, 20, 30, 40, 50, 60]),
])  # fmt: skip
def test_which_checkpoints_are_kept(tmp_path, keep, left):
    fake_checkpoints(tmp_path, 10, 20, 30, 40, 50, 60)
    (tmp_path / "step-00000070").mkdir()  # incomplete: neither counted nor removed
    remove_expired(tmp_path, keep)
    assert complete_checkpoints(tmp_path) == [step_folder(tmp_path, step) for step in left]
    assert sorted(tmp_path.iterdir()) == [step_folder(tmp_path, step) for step in (*left, 70)]


def test_an_incomplete_newest_checkpoint_is_skipped_and_reported(tmp_path):
    folder = tmp_path / CHECKPOINTS
    one, two, three = fake_checkpoints(folder, 100, 200, 100_000_000)
    (folder / LATEST).symlink_to(three.name)
    assert describe_incomplete(folder) == []
    (three / MANIFEST).unlink()
    (line,) = describe_incomplete_in(tmp_path)
    assert f"{three}: incomplete" in line
    assert line.endswith("the newest complete checkpoint is step-00000200")
    assert find_checkpoint(tmp_path) == newest_checkpoint(folder) == two
    shutil.rmtree(three)
    (line,) = describe_incomplete_in(tmp_path)
    assert "latest: does not point to a checkpoint" in line
    assert (find_checkpoint(folder), describe_incomplete_in(one)) == (two, [])
    for each in (one, two):
        (each / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="step-00000100: incomplete"):
        find_checkpoint(tmp_path)
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)


def test_a_save_that_training_waits_for_reports_its_progress(tmp_path, monkeypatch):
    model, optimizer = trained("full_shard")
    beats: list[str] = []
    monkeypatch.setattr(STATUS_PAGE, "at", beats.append)
    written = vars(manifest)["write_tensor_file"]

    def write_slowly(path: Path, header: bytes, chunks: Iterator[memoryview]) -> int:
        size = int(written(path, header, chunks))
        threading.Event().wait(1.7)
        return size

    monkeypatch.setattr(manifest, "write_tensor_file", write_slowly)
    make_saver(tmp_path, "sync").save(run_at(model, optimizer, 2))
    assert beats.count("saving") >= 2


def test_a_save_waits_for_the_checksum_of_its_base_and_says_so(tmp_path, monkeypatch):
    message = threading.Event()

    def verified(*options: object) -> BaseInfo:
        message.wait(60)
        return BaseInfo("base", "1", "0")

    monkeypatch.setattr(checkpoints, "_SILENT_WAIT_SECONDS", 0.1)
    base = Mock(record=BaseInfo("base", "", "0"), is_recorded=True, verify=verified)
    model, optimizer = trained("full_shard", steps=1)
    saver = make_saver(tmp_path, "async", bases=[base])
    journal: Any = saver._journal
    journal.remark.side_effect = lambda line: message.set()
    saver.begin(run_at(model, optimizer, 1))
    save_now(saver, model, optimizer, 2)
    (result,) = complete_checkpoints(tmp_path / CHECKPOINTS)
    assert CheckpointReader(result).manifest.base == BaseInfo("base", "1", "0")
    journal.remark.assert_called_once_with("step 2: waiting for the checksum of base model base")
