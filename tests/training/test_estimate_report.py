"""The comparison of the first steps with the estimate and the prediction."""

import json
from pathlib import Path

import pytest

from fsdpctl.io.run_files import ESTIMATE
from fsdpctl.run.environment import SavedEstimate
from fsdpctl.training.callbacks.reporting import EstimateReport, _compared_peaks

MIB = 1 << 20


def write_estimate(folder: Path, **kwargs: object) -> Path:
    known = {"peak_allocated_bytes": MIB, "peak_reserved_bytes": MIB}
    (folder / ESTIMATE).write_text(json.dumps({**known, **kwargs}))
    return folder


def test_the_step_time_is_compared_with_the_prediction(tmp_path):
    checks = EstimateReport(
        write_estimate(
            tmp_path, predicted_step_seconds=0.3, prediction_source="specs of cluster=h100"
        ),
        0,
    )
    checks._seconds = [9.0, 0.2, 0.28]
    result = checks.time_report()
    assert result is not None
    message, values = result
    assert message == (
        "step time: 0.24 s measured, 0.3 s predicted (25% above measured; specs of cluster=h100)"
    )
    assert values == {"step_seconds": pytest.approx(0.24), "predicted_step_seconds": 0.3}


def test_without_an_estimate_nothing_is_compared(tmp_path):
    for folder in (write_estimate(tmp_path), tmp_path / "elsewhere"):
        checks = EstimateReport(folder, 0)
        checks._seconds = [1.0] * 3
        assert checks.time_report() is None
    assert checks.memory_report(MIB) == "memory: 1.0 MiB per process, with Python and its libraries"


def test_peak_memory_is_compared_with_the_estimate(tmp_path):
    known = SavedEstimate(4 * MIB, 6 * MIB, MIB)
    peaks = {"peak_allocated_bytes": 4 * MIB, "peak_reserved_bytes": 8 * MIB}
    assert _compared_peaks(peaks, known) == (
        "memory: 4.0 MiB allocated peak, equal to the estimate; "
        "8.0 MiB reserved peak, 6.0 MiB estimated (25.0% below measured)"
    )
    assert EstimateReport(write_estimate(tmp_path), 0).memory_report(9 * MIB) == (
        "memory: 9.0 MiB per process, with Python and its libraries; 1.0 MiB estimated for tensors"
    )
