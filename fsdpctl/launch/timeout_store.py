"""A store of which nobody waits longer than so: torch's own time-outs do not hold on a dead link.

A host that is gone without a word, for want of power or a cable, holds each call for a quarter of
an hour, until the kernel gives up its connection.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from fsdpctl.comm.stores import Store

T = TypeVar("T")
_MOMENT = 0.5  # seconds


class StoreLostError(RuntimeError):
    """It did not answer in time, and is not asked again."""


class BoundedStore:
    """Asks a store in threads that may be held up; one asker at a time."""

    def __init__(self, store: Store, seconds: float) -> None:
        """Of `store`, which nobody else uses; waits at most so many seconds for an answer."""
        self._store, self._seconds = store, seconds
        self._is_lost = False

    def set(self, key: str, value: str) -> None:
        """As torch has it.

        Raises:
            StoreLostError: it did not answer; so in the others.
        """
        self._ask(lambda: self._store.set(key, value), self._seconds)

    def get(self, key: str) -> bytes:
        """As torch has it."""
        return self._ask(lambda: self._store.get(key), self._seconds)

    def check(self, keys: list[str]) -> bool:
        """As torch has it."""
        return self._ask(lambda: self._store.check(keys), self._seconds)

    def wait(self, keys: list[str], most: timedelta) -> None:
        """As torch has it, and not longer."""
        self._ask(lambda: self._store.wait(keys, most), most.total_seconds() + 1)

    def _ask(self, call: Callable[[], T], seconds: float) -> T:
        if self._is_lost:
            raise StoreLostError("the store of the nodes does not answer")
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((call(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=ask, daemon=True).start()
        try:
            answer, error = answers.get(timeout=seconds)
        except queue.Empty:
            self._is_lost = True
            raise StoreLostError("the store of the nodes does not answer") from None
        if error is not None:
            raise error
        found: T = answer
        return found


class Noticed:
    """Whether a key is there, by a thread of its own: who looks never waits."""

    def __init__(self, store: Store, *, otherwise: bool) -> None:
        """Look in `store`, which nobody else uses; `otherwise`: what holds where that fails."""
        self._store, self._otherwise = store, otherwise
        self._found: dict[str, bool] = {}
        self._asking: threading.Thread | None = None

    def has(self, key: str) -> bool:
        """As far as is known by now; a moment is waited for the first answer."""
        if not self._found.get(key) and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._look, args=(key,), daemon=True)
            self._asking.start()
            self._asking.join(_MOMENT)
        return self._found.get(key, False)

    def _look(self, key: str) -> None:
        try:
            self._found[key] = self._store.check([key])
        except RuntimeError:
            self._found[key] = self._otherwise
