"""Selects and orders tests by when slow tests last passed and what fast ones cost.

`ledger.json` has a line per test. The line of a slow test has the day on which it last passed and
its seconds. Slow runs write it; commit it after them. The line of a fast test has its CPU
seconds without a day, if they are many: `pytest --record` writes it.
`python -m tests.ledger` marks the tests slow whose CPU seconds are too many for the fast suite.
"""

import ast
import datetime
import json
import random
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
import pytest

LEDGER = Path(__file__).parent / "ledger.json"
_UNSEEN = ("", 10.0)  # a new test has a usual one's seconds
_EVERY = 20  # passed tests between two writes
_MANY, _TOO_MANY = 0.3, 1.5  # CPU seconds of a fast test
_FEW = 0.02  # of a test without a line
# Functions that stay fast: no other fast test checks the same, or imports are their cost.
_KEPT = {
    "tests/commands/test_run.py::test_a_run_leaves_what_it_promises",
    "tests/config/test_compose.py::test_every_option_composes_and_has_a_description",
    "tests/documented/test_checked.py::test_every_command_line_is_accepted",
    "tests/emulated/test_engine.py::test_strategies_give_the_losses_of_cpu_ranks",
    "tests/engine/test_compiled.py::test_sharded_blocks_stay_compiled",
    "tests/engine/test_one_path.py::test_a_fault_in_making_them_is_found",
    "tests/engine/test_one_path.py::test_the_same_buffers_are_sent",
    "tests/engine/test_parity.py::test_equals_one_process",
    "tests/engine/test_trace.py::test_events_bytes_and_buffers_equal_the_plan",
    "tests/models/test_decoders.py::test_trains_as_transformers",
    "tests/models/test_quantized.py::test_one_fused_kernel_gives_the_same_bits_for_all_shapes",
    "tests/optim/test_states.py::test_bits_do_not_depend_on_ranks",
    "tests/optim/test_states.py::test_fused_steps_have_the_same_bits_and_few_graphs",
    "tests/test_architecture.py::test_the_package_keeps_the_rule",
    "tests/test_docs.py::test_generated_tables_are_up_to_date",
    "tests/test_language.py::test_all_prose_uses_the_vocabulary",
    "tests/training/test_collections.py::test_all_ranks_collect_after_the_same_steps",
    "tests/training/test_heap.py::test_collectives_are_recorded_up_to_a_number_and_all_are_counted",
    "tests/training/test_lora.py::test_losses_are_those_of_a_plain_loop_with_peft",
    "tests/training/test_own.py::test_an_interruption_changes_no_bit",
}

Ledger = dict[str, tuple[str, float]]  # by a test's identifier: the day, and seconds


class Meter:
    """Adds the CPU seconds of this process and its descendants to the report of each test."""

    def __init__(self) -> None:
        self._before = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._before = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.user_properties.append(("cpu", _cpu_seconds() - self._before))
        return report


class Recorder:
    """Writes the tests that passed to the ledger, in the main process of pytest."""

    def __init__(self, path: Path = LEDGER) -> None:
        self._path = path
        self._passed: Ledger = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not report.passed:
            return
        if "slow" in report.keywords:
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            self._passed[report.nodeid] = (today, round(report.duration, 1))
        elif isinstance(cpu := dict(report.user_properties).get("cpu"), float):
            self._passed[report.nodeid] = ("", round(cpu, 1))
        if len(self._passed) >= _EVERY:
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        if self._passed:
            seen = {**read(self._path), **self._passed}
            rows = {k: (day, s) for k, (day, s) in seen.items() if day or s >= _MANY}
            write(rows, self._path)
            self._passed.clear()


def _cpu_seconds() -> float:
    """Sum CPU seconds of this process, its descendants, and processes that they have waited for."""
    total = 0.0
    for process in (here := psutil.Process(), *here.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended, and its parent counts it
            total += sum(process.cpu_times()[:4])
    return total


def read(path: Path = LEDGER) -> Ledger:
    if not path.exists():
        return {}
    content: dict[str, list[Any]] = json.loads(path.read_text())
    return {test: (day, seconds) for test, (day, seconds) in content.items()}


def write(ledger: Ledger, path: Path = LEDGER) -> None:
    lines = (f"{json.dumps(test)}: {json.dumps(ledger[test])}" for test in sorted(ledger))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def longest_unseen(tests: Sequence[str], ledger: Ledger, seconds: float) -> set[str]:
    """Return the tests that passed longest ago, as many as take `seconds` together.

    Tests of the same day are in an order that their names determine.
    """
    drawn: set[str] = set()
    by_day = sorted(tests, key=lambda each: (ledger.get(each, _UNSEEN)[0], crc32(each.encode())))
    for test in by_day:
        seconds -= ledger.get(test, _UNSEEN)[1]
        if seconds < 0:
            break
        drawn.add(test)
    return drawn


def longest_first(tests: Sequence[str], ledger: Ledger) -> list[str]:
    """Sort the files of `tests` by their CPU seconds; a file's tests keep their order."""
    cost = dict.fromkeys(map(_file, tests), 0.0)
    for test in tests:
        cost[_file(test)] += ledger.get(test, ("", _FEW))[1]
    return sorted(tests, key=lambda test: -cost[_file(test)])


def shuffled(tests: Sequence[str], seed: int) -> list[str]:
    """Shuffle the files of `tests` and the tests of each."""
    draw = random.Random(seed).random
    order = {file: draw() for file in dict.fromkeys(map(_file, tests))}
    return sorted(tests, key=lambda test: (order[_file(test)], draw()))


def too_long(ledger: Ledger) -> dict[str, list[str]]:
    """Return the fast tests whose CPU seconds are too many, by their function."""
    results: dict[str, list[str]] = {}
    for test, (day, seconds) in ledger.items():
        function, _, _ = test.partition("[")
        if not day and seconds > _TOO_MANY and function not in _KEPT:
            results.setdefault(function, []).append(test)
    return results


def mark(function: str, root: Path) -> None:
    """Add the mark `slow` to a function of the tests, given as `FILE::NAME`."""
    file, _, name = function.partition("::")
    lines = (root / file).read_text().splitlines(keepends=True)
    for each in ast.parse("".join(lines)).body:
        if isinstance(each, ast.FunctionDef) and each.name == name:
            line = min([each.lineno, *(first.lineno for first in each.decorator_list)])
            if "@pytest.mark.slow\n" not in lines[line - 1 : each.lineno]:
                lines.insert(line - 1, "@pytest.mark.slow\n")
    (root / file).write_text("".join(lines))


def _file(test: str) -> str:
    return test.partition("::")[0]


if __name__ == "__main__":
    for function, cases in too_long(read()).items():
        mark(function, LEDGER.parent.parent)
        print(f"{function} is slow now: {len(cases)} cases over {_TOO_MANY} CPU seconds")
