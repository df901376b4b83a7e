"""A step beside what was foreseen of it."""

import json
from pathlib import Path

import pytest

from fsdpctl.estimate.saved import ESTIMATE
from fsdpctl.train.time_check import TimeCheck


def kept(folder: Path, **about: object) -> Path:
    known = {"peak_allocated_bytes": 1, "peak_reserved_bytes": 1, "peak_engine_bytes": None}
    (folder / ESTIMATE).write_text(json.dumps({**known, **about}))
    return folder


def test_three_steps_are_told_beside_what_was_foreseen_once(tmp_path):
    check = TimeCheck(kept(tmp_path, predicted_step_seconds=0.3, prediction_source="a profile"))
    told = [check.after(seconds) for seconds in (9.0, 0.2, 0.28, 0.2)]
    assert [each is None for each in told] == [True, True, False, True]
    assert told[2] is not None
    said, figures = told[2]
    assert said == "time: 0.24 s a step (foreseen 0.3 s, +25%, by a profile)"
    assert figures == {"step_seconds": pytest.approx(0.24), "predicted_step_seconds": 0.3}


def test_nothing_is_told_where_nothing_was_foreseen(tmp_path):
    for folder in (kept(tmp_path), tmp_path / "elsewhere"):
        check = TimeCheck(folder)
        assert [check.after(1.0) for _ in range(4)] == [None] * 4
