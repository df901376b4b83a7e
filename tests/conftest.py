"""Settings of the whole suite."""

import os
import random
import signal

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in children
for _name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(_name, None)
os.environ.update(NO_COLOR="1", TERM="dumb", TERMINAL_WIDTH="100", HF_HUB_OFFLINE="1")

# Whoever runs tests in the background may have it ignored, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("fsdpctl", derandomize=True, deadline=None)
settings.load_profile("fsdpctl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=float, default=1.0, help="run this share of the tests")
    parser.addoption("--seed", default="", help="that they are drawn by")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, seed = config.getoption("--sample"), config.getoption("--seed")
    drawn = [each for each in items if random.Random(f"{seed} {each.nodeid}").random() < share]
    if len(drawn) < len(items):
        config.hook.pytest_deselected(items=[each for each in items if each not in drawn])
        items[:] = drawn
