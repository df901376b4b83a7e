"""Settings of the whole suite."""

import functools
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in children
for _name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(_name, None)
os.environ.update(NO_COLOR="1", TERM="dumb", TERMINAL_WIDTH="100", HF_HUB_OFFLINE="1")

# Whoever runs tests in the background may have it ignored, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

from fsdpctl.data.chats import workers  # noqa: E402  # after the environment
from fsdpctl.data.files import standard_library  # noqa: E402

settings.register_profile("fsdpctl", derandomize=True, deadline=None)
settings.load_profile("fsdpctl")


@pytest.fixture(scope="session", autouse=True)
def _what_many_tests_need_once() -> Iterator[None]:
    """Read the standard library once, and start each process for templates ahead of its use."""
    spare = Spare(workers._start)
    with (
        mock.patch("fsdpctl.data.open.standard_library", functools.cache(standard_library)),
        mock.patch.object(workers, "_start", spare.take),
    ):
        yield
    spare.close()


Started = tuple[subprocess.Popen[bytes], "Connection[Any, Any]"]


class Spare:
    """A process for templates that starts before it is needed."""

    def __init__(self, start: Callable[[], Started]) -> None:
        self._start = start
        self._next: Started | None = None

    def take(self) -> Started:
        taken = self._next or self._start()
        self._next = self._start()
        return taken

    def close(self) -> None:
        if self._next is not None:
            process, connection = self._next
            process.kill()
            process.wait()
            connection.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=float, default=1.0, help="run this share of the tests")
    parser.addoption("--seed", default="", help="that they are drawn by")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, seed = config.getoption("--sample"), config.getoption("--seed")
    drawn = [each for each in items if random.Random(f"{seed} {each.nodeid}").random() < share]
    if len(drawn) < len(items):
        config.hook.pytest_deselected(items=[each for each in items if each not in drawn])
        items[:] = drawn
