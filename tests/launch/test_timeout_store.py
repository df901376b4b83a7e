"""A store on a dead link holds its asker for a quarter of an hour; nobody here waits for that."""

import threading
import time
from datetime import timedelta

import pytest

from fsdpctl.launch.timeout_store import BoundedStore, Noticed, StoreLostError


class DeadLink:
    """Answers once somebody mends it."""

    def __init__(self) -> None:
        self.mended = threading.Event()
        self.error: Exception | None = None

    def check(self, keys: list[str]) -> bool:
        self.mended.wait()
        if self.error is not None:
            raise self.error
        return keys == ["there"]

    def wait(self, keys: list[str], most: timedelta) -> None:
        self.mended.wait()

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("no room")


def test_who_asks_waits_so_long_and_then_no_more():
    store = BoundedStore(DeadLink(), 0.3)  # type: ignore[arg-type]
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
    link.mended.set()
    store = BoundedStore(link, 5)  # type: ignore[arg-type]
    assert store.check(["there"])
    assert not store.check(["elsewhere"])
    with pytest.raises(RuntimeError, match="no room"):
        store.set("there", "")


def test_who_looks_never_waits():
    link = DeadLink()
    noticed = Noticed(link, otherwise=True)  # type: ignore[arg-type]
    began = time.monotonic()
    assert not noticed.has("there")
    assert not noticed.has("there")
    assert time.monotonic() - began < 5
    link.mended.set()
    while not noticed.has("there"):
        assert time.monotonic() - began < 20
    assert noticed.has("there")


@pytest.mark.parametrize("otherwise", [False, True])
def test_where_nobody_can_say_the_rest_holds(otherwise):
    link = DeadLink()
    link.error = RuntimeError("gone")
    link.mended.set()
    assert Noticed(link, otherwise=otherwise).has("there") is otherwise  # type: ignore[arg-type]
