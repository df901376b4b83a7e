"""Settings of the whole suite."""

import functools
import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import IO
from unittest import mock

import pytest
from hypothesis import settings

gc.disable()  # modules stay: collecting during imports would be wasted

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in children
for _name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(_name, None)
os.environ.update(NO_COLOR="1", TERM="dumb", TERMINAL_WIDTH="100", HF_HUB_OFFLINE="1")

# A shell may ignore SIGINT for background jobs, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

from fsdpctl.chats import template_processes  # noqa: E402  # after the environment
from fsdpctl.data.documents import standard_library  # noqa: E402
from tests import ledger  # noqa: E402

_BEGAN = time.monotonic()
_start = template_processes._start
settings.register_profile("fsdpctl", derandomize=True, deadline=None)
settings.load_profile("fsdpctl")


def _render_here(requests: IO[bytes], replies: IO[bytes]) -> mock.Mock:
    with mock.patch.object(template_processes, "_limit"):
        template_processes.main(requests, replies)
    return mock.Mock()


@pytest.fixture(scope="session", autouse=True)
def _what_many_tests_need_once() -> Iterator[None]:
    """Read the standard library once, and render templates in this process."""
    with (
        mock.patch("fsdpctl.data.open_text.standard_library", functools.cache(standard_library)),
        mock.patch.object(template_processes, "_start", _render_here),
    ):
        yield


@pytest.fixture
def template_processes_of_a_run() -> Iterator[None]:
    """Start the processes for templates as a run does."""
    with mock.patch.object(template_processes, "_start", _start):
        yield


def pytest_collection_finish() -> None:
    gc.freeze()  # a collection need not visit all modules and tests
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="run the tests longest unseen, for so long")
    parser.addoption("--order", type=int, help="shuffle the tests, the same way for the same seed")
    parser.addoption("--record", action="store_true", help="write CPU seconds to the ledger")


def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ.pop("FSDPCTL_CACHE", None)  # an earlier test may have set a fallback
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - _BEGAN > minutes * 60:
        pytest.skip("the time is used")  # the tests took longer than the ledger says


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ledger.Recorder())
    if config.getoption("--record"):
        config.pluginmanager.register(ledger.Meter())


@pytest.hookimpl(trylast=True)  # of the tests that -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen, by_id = ledger.read(), {each.nodeid: each for each in items}
    tests, seed = list(by_id), config.getoption("--order")
    if minutes := config.getoption("--minutes"):
        drawn = ledger.longest_unseen(tests, seen, minutes * 60)
        config.hook.pytest_deselected(items=[by_id[each] for each in tests if each not in drawn])
        tests = [each for each in tests if each in drawn]
    if seed is not None:
        tests = ledger.shuffled(tests, seed)
    elif hasattr(config, "workerinput"):
        tests = ledger.longest_first(tests, seen)
    items[:] = [by_id[each] for each in tests]
