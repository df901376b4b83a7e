"""metrics.jsonl: a start writes it, and the next start cuts it to the resumed step."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.run.metrics import MetricsFile, last_step, read_metrics, validation_loss_at
from tests.run.runs import REJECTED


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *lines: dict[str, Any], end: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_after_the_checkpoint_are_removed(path: Path):
    write(path, *({"step": step} for step in range(1, 6)), end='{"st')
    file = MetricsFile(path, 3)
    file.write({"step": 4, "loss": 1.0})
    file.close()
    assert read(path) == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "loss": 1.0}]


def test_a_file_with_a_corrupted_line_is_not_changed(path: Path):
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"metrics.jsonl, line 2: corrupted"):
        MetricsFile(path, 3)
    assert len(path.read_text().splitlines()) == 3


def test_a_file_that_cannot_be_written_is_named(path: Path):
    path.mkdir()
    with pytest.raises(UsageError, match=r"metrics.jsonl: " + os.strerror(errno.EISDIR)):
        MetricsFile(path, 0)


def test_the_reader_distinguishes_missing_from_non_finite_values(path: Path):
    path.write_text('{"step": 1, "loss": null, "grad_norm": 2}\n{"step": 1, "val_loss": 3.5}\n{"st')
    step, validation = read_metrics(path)
    assert (step.loss, step.grad_norm, step.val_loss) == (None, 2.0, UNSET)
    assert (validation.loss, validation.val_loss) == (UNSET, 3.5)
    assert (step.is_step, validation.is_step) == (True, False)


def test_lines_of_several_threads_stay_whole(path: Path):
    file = MetricsFile(path, 0)
    line = {"step": 1, "loss/x": "x" * 20_000}  # more than one write

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(file.write, [line] * 200))
    file.close()
    assert read(path) == [line] * 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_named(path: Path):
    file = MetricsFile(path, 0)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file._file.fileno())
    with pytest.raises(FsdpctlError, match=r"metrics.jsonl: " + os.strerror(errno.ENOSPC)):
        file.write({"step": 1})
    file.close()


def test_rejected_steps_are_not_removed(path: Path):
    bad = {"step": 5, "rejected_step": REJECTED}
    write(path, {"step": 4, "loss": 1.0}, {"step": 5, "loss": None}, bad)
    file = MetricsFile(path, 3)
    file.write({"step": 4, "loss": 2.0})
    assert file.is_in_place
    file.close()
    assert read(path) == [bad, {"step": 4, "loss": 2.0}]


def test_a_finite_validation_loss_is_found(path: Path):
    assert validation_loss_at(path, 20) is None
    validated = {"step": 20, "val_loss": 1.5}, {"step": 40, "val_loss": None}
    write(path, validated[0], {"step": 40, "loss": 2.0}, validated[1])
    assert (validation_loss_at(path, 20), validation_loss_at(path, 40)) == (1.5, None)


def test_the_last_step_is_the_newest_whatever_follows_it(path: Path):
    path.write_text('{"step": 40, "loss": 1.0}\n{"step": 25, "val_loss": 1}\n{"st')
    assert last_step(path) == 40
