"""What is written down of every step."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.run.metrics import MetricsFile, last_step, was_validated, went_on


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"st')
    file = MetricsFile(path, 3)
    file.write({"step": 4, "loss": 1.0})
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "loss": 1.0}]


def test_a_damaged_line_is_not_cut_off(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"metrics.jsonl: line 2 is damaged"):
        MetricsFile(path, 3)
    assert len(path.read_text().splitlines()) == 3


def test_what_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"metrics.jsonl: " + os.strerror(errno.EISDIR)):
        MetricsFile(tmp_path / "metrics.jsonl", 0)


def test_others_are_told_of_each_line_that_was_written(tmp_path: Path):
    path, heard = tmp_path / "metrics.jsonl", []
    file = MetricsFile(path, 0, lambda line: heard.append((line["step"], path.read_text())))
    file.write({"step": 1})
    file.write({"step": 2})
    file.close()
    assert heard == [(1, '{"step": 1}\n'), (2, '{"step": 1}\n{"step": 2}\n')]


def test_lines_of_several_threads_stay_whole(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    line = {"step": 1, "warning": "x" * 20_000}  # more than is written at once

    def write() -> None:
        for _ in range(50):
            file.write(line)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(each) for each in lines] == [line] * 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_named(tmp_path: Path):
    full = tmp_path / "metrics.jsonl"
    full.symlink_to("/dev/full")
    file = MetricsFile(full, 0)
    with pytest.raises(FsdpctlError, match=r"metrics.jsonl: " + os.strerror(errno.ENOSPC)):
        file.write({"step": 1})
    file.close()


def test_what_is_known_of_steps_that_were_not_applied_is_not_cut_off(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    bad = {"step": 5, "bad_numbers": {"reason": "nonfinite_loss"}}
    lines = [{"step": 4, "loss": 1.0}, {"step": 5, "loss": None}, bad]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = MetricsFile(path, 3)
    file.write({"step": 4, "loss": 2.0})
    file.write({"step": 5, "loss": 3.0})
    file.cut_back(4)
    file.write({"step": 5, "loss": 4.0})
    assert file.is_in_place
    file.close()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == [bad, {"step": 4, "loss": 2.0}, {"step": 5, "loss": 4.0}]


def test_earlier_saves_tell_how_long_one_may_take(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    new = MetricsFile(path, 0)
    new.close()
    assert new.seconds_to_save == 0.0
    lines = [{"step": step, "checkpoint_write_seconds": step / 2} for step in (3, 9, 5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    later = MetricsFile(path, 4)
    later.close()
    assert later.seconds_to_save == 4.5  # of a step that is cut off, too


def test_a_validation_that_is_there_is_found(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert not was_validated(path, 20)
    lines = [
        {"step": 20, "val_loss": 1.5},
        {"step": 40, "loss": 2.0},
        {"step": 40, "val_loss": None},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert was_validated(path, 20)
    assert not was_validated(path, 40)


def test_the_last_step_is_the_newest_whatever_is_told_after_it(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 40, "loss": 1.0}\n{"step": 25, "after_save": "done"}\n{"st')
    assert last_step(path) == 40


def test_ranks_that_were_started_again_went_on_once_they_have_said_so(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert not went_on(path, 1)
    path.write_text('{"step": 30, "loss": 1.0}\n')
    assert not went_on(path, 1)
    path.write_text('{"step": 26, "restart": {"number": 1}}\n{"step": 26, "loss": 1.0}\n')
    assert went_on(path, 1)
    assert not went_on(path, 2)
