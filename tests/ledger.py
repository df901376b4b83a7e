"""When each slow test last passed, so that those longest unseen run first.

`ledger.json` has a line per test: the day on which it last passed, and its seconds. Slow runs write
it as they go, and whoever runs them commits it.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

LEDGER = Path(__file__).parent / "ledger.json"
_UNSEEN = ("", 10.0)  # a new test has a usual one's seconds
_EVERY = 20  # passed tests between two writes

Ledger = dict[str, tuple[str, float]]  # by a test's identifier: the day, and seconds


class Recorder:
    """Writes which slow tests passed, in the process that has started the others."""

    def __init__(self, path: Path = LEDGER) -> None:
        self._path = path
        self._passed: Ledger = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and "slow" in report.keywords:
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            self._passed[report.nodeid] = (today, round(report.duration, 1))
            if len(self._passed) >= _EVERY:
                self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        if self._passed:
            write({**read(self._path), **self._passed}, self._path)
            self._passed.clear()


def read(path: Path = LEDGER) -> Ledger:
    if not path.exists():
        return {}
    found: dict[str, list[Any]] = json.loads(path.read_text())
    return {test: (day, seconds) for test, (day, seconds) in found.items()}


def write(ledger: Ledger, path: Path = LEDGER) -> None:
    lines = (f"{json.dumps(test)}: {json.dumps(ledger[test])}" for test in sorted(ledger))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def longest_unseen(tests: Sequence[str], ledger: Ledger, seconds: float) -> set[str]:
    """Return those that passed longest ago, as many as take `seconds` together.

    Those of one day are mixed, the same ones for the same ledger.
    """
    drawn: set[str] = set()
    by_day = sorted(tests, key=lambda each: (ledger.get(each, _UNSEEN)[0], crc32(each.encode())))
    for test in by_day:
        seconds -= ledger.get(test, _UNSEEN)[1]
        if seconds < 0:
            break
        drawn.add(test)
    return drawn
