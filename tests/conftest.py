"""Settings of the whole suite."""

import os
import random

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in children
for _name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(_name, None)
os.environ.update(NO_COLOR="1", TERM="dumb", TERMINAL_WIDTH="100", HF_HUB_OFFLINE="1")

settings.register_profile("fsdpctl", derandomize=True, deadline=None)
settings.load_profile("fsdpctl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=float, default=1.0, help="of the tests marked `sampled`")
    parser.addoption("--seed", default="0", help="decides which they are")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out sampled tests beyond the share that was asked for, others with each seed."""
    sampled = [item for item in items if item.get_closest_marker("sampled")]
    kept = round(len(sampled) * config.getoption("--share"))
    left_out = set(random.Random(config.getoption("--seed")).sample(sampled, len(sampled) - kept))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
