from pathlib import Path

import pytest

from tests import ledger

SEEN: ledger.Ledger = {"old": ("2026-01-02", 30.0), "new": ("2026-03-04", 5.0)}


def test_tests_never_seen_run_first_then_the_oldest_until_the_time_is_used() -> None:
    tests = ["new", "old", "unseen"]
    assert ledger.longest_unseen(tests, SEEN, seconds=100) == {*tests}
    assert ledger.longest_unseen(tests, SEEN, seconds=40) == {"unseen", "old"}
    assert ledger.longest_unseen(tests, SEEN, seconds=12) == {"unseen"}


def test_the_ledger_keeps_what_was_seen_and_changes_what_passes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    ledger.write(SEEN, path)
    recorder = ledger.Recorder(path)
    for test, outcome, marks in [
        ("old", "passed", {"slow": 1}), ("new", "failed", {"slow": 1}), ("fast", "passed", {}),
    ]:  # fmt: skip
        recorder.pytest_runtest_logreport(
            pytest.TestReport(test, ("", 0, ""), marks, outcome, None, "call", duration=2.34)  # type: ignore[arg-type]
        )
    recorder.pytest_sessionfinish()
    found = ledger.read(path)
    assert found.keys() == SEEN.keys()
    assert found["new"] == SEEN["new"]
    assert found["old"][0] > "2026-11"
    assert found["old"][1] == 2.3
