from pathlib import Path

import pytest

from tests import ledger, versions

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
    for test, outcome, marks, cpu in [
        ("old", "passed", {"slow": 1}, 9), ("new", "failed", {"slow": 1}, 9),
        ("fast", "passed", {}, 0.1), ("long", "passed", {}, 4.0), ("red", "failed", {}, 4.0),
    ]:  # fmt: skip
        report_fields = {"duration": 2.34, "user_properties": [("cpu", float(cpu))]}
        report = pytest.TestReport(test, ("", 0, ""), marks, outcome, None, "call", **report_fields)  # type: ignore[arg-type]
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    result = ledger.read(path)
    assert result.keys() == {*SEEN, "long"}
    assert result["long"] == ("", 4.0)
    assert result["new"] == SEEN["new"]
    assert result["old"][0] > "2026-11"
    assert result["old"][1] == 2.3


def test_the_files_that_cost_most_run_first() -> None:
    tests = ["a.py::1", "a.py::2", "b.py::1", "c.py::1", "c.py::2", "c.py::3"]
    seen: ledger.Ledger = {"b.py::1": ("", 2.0), "a.py::2": ("", 0.5)}
    assert ledger.longest_first(tests, seen) == [tests[2], *tests[:2], *tests[3:]]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_orders_files_and_the_tests_of_each(seed: int) -> None:
    tests = [f"{file}.py::{each}" for file in range(9) for each in range(9)]
    result = ledger.shuffled(tests, seed)
    assert result == ledger.shuffled(tests, seed)
    assert sorted(result) == sorted(tests)
    assert result not in (tests, ledger.shuffled(tests, 3))
    files = [each[0] for each in result]
    assert all(len({*files[k : k + 9]}) == 1 for k in range(0, 81, 9))


def test_the_script_marks_what_costs_too_much(tmp_path: Path) -> None:
    text = "\n@parametrize('n', [1])\ndef test_a(n):\n    pass\n\ndef test_b():\n    pass\n"
    (tmp_path / "t.py").write_text(text)
    seen: ledger.Ledger = {
        "t.py::test_a[1]": ("", 1.6), "t.py::test_b": ("", 1.5), "t.py::test_c": ("2026-11-28", 9.0)
    }  # fmt: skip
    for function in (*ledger.too_long(seen), *ledger.too_long(seen)):
        ledger.mark(function, tmp_path)
    assert (tmp_path / "t.py").read_text() == text.replace("@param", "@pytest.mark.slow\n@param")


def test_tests_that_a_list_names_exist() -> None:
    """A path that pytest does not find ends the run of a library's versions without a test."""
    root = versions.ROOT
    assert [each for each in versions._TESTS if not (root / each).exists()] == []
    test_ids = [each.split("::") for each in sorted(ledger._KEPT)]
    runs = [("tests/commands/test_run.py", each) for each in versions._RUNS]
    gone = [each for file, each in (*test_ids, *runs) if each not in (root / file).read_text()]
    assert gone == []
