"""A store on a dead link blocks its caller for a quarter of an hour; these wrappers do not."""

import threading
import time
from datetime import timedelta

import pytest

from fsdpctl.launch.rendezvous import KeyWatcher, StoreLostError, TimeoutStore


class DeadLink:
    """A store that answers once its link is repaired."""

    def __init__(self) -> None:
        self.repaired = threading.Event()
        self.error: Exception | None = None

    def check(self, keys: list[str]) -> bool:
        self.repaired.wait()
        if self.error is not None:
            raise self.error
        return keys == ["there"]

    def wait(self, keys: list[str], most: timedelta) -> None:
        self.repaired.wait()

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("no room")


def test_a_caller_waits_once_until_the_time_limit():
    store = TimeoutStore(DeadLink(), 0.3)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(StoreLostError):
        store.check(["there"])
    assert 0.2 < time.monotonic() - began < 5
    began = time.monotonic()
    with pytest.raises(StoreLostError):
        store.wait(["there"], timedelta(seconds=60))
    assert time.monotonic() - began < 0.2


def test_answers_and_errors_come_through():
    link = DeadLink()
    link.repaired.set()
    store = TimeoutStore(link, 5)  # type: ignore[arg-type]
    assert store.check(["there"])
    assert not store.check(["elsewhere"])
    with pytest.raises(RuntimeError, match="no room"):
        store.set("there", "")


def test_a_watcher_never_blocks():
    link = DeadLink()
    watcher = KeyWatcher(link, default=True)  # type: ignore[arg-type]
    began = time.monotonic()
    assert not watcher.has("there")
    assert not watcher.has("there")
    assert time.monotonic() - began < 5
    link.repaired.set()
    while not watcher.has("there"):
        assert time.monotonic() - began < 20
    assert watcher.has("there")


@pytest.mark.parametrize("default", [False, True])
def test_a_watcher_returns_the_default_if_the_store_fails(default):
    link = DeadLink()
    link.error = RuntimeError("gone")
    link.repaired.set()
    assert KeyWatcher(link, default=default).has("there") is default  # type: ignore[arg-type]
