"""Access to a store with a time limit, which torch's own timeouts do not enforce on a dead link.

If a host disappears without closing its connections, because its power or network fails, each call
blocks for a quarter of an hour, until the kernel gives up the connection.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from fsdpctl.comm.world import Store

T = TypeVar("T")
_MOMENT = 0.5  # seconds


class StoreLostError(RuntimeError):
    """The store did not answer in time, and is not used again."""


class TimeoutStore:
    """A store whose calls run in threads of their own; for one caller at a time."""

    def __init__(self, store: Store, seconds: float) -> None:
        """Wrap `store`, which has no other user; a call takes at most `seconds`."""
        self._store, self._seconds = store, seconds
        self._is_lost = False

    def set(self, key: str, value: str) -> None:
        """Call torch's `set`.

        Raises:
            StoreLostError: If the store does not answer in time; likewise in the other methods.
        """
        self._call(lambda: self._store.set(key, value), self._seconds)

    def get(self, key: str) -> bytes:
        """Call torch's `get`."""
        return self._call(lambda: self._store.get(key), self._seconds)

    def check(self, keys: list[str]) -> bool:
        """Call torch's `check`."""
        return self._call(lambda: self._store.check(keys), self._seconds)

    def wait(self, keys: list[str], most: timedelta) -> None:
        """Call torch's `wait`, which takes at most `most`."""
        self._call(lambda: self._store.wait(keys, most), most.total_seconds() + 1)

    def _call(self, call: Callable[[], T], seconds: float) -> T:
        if self._is_lost:
            raise StoreLostError("the store of the nodes does not answer")
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=run, daemon=True).start()
        try:
            answer, error = answers.get(timeout=seconds)
        except queue.Empty:
            self._is_lost = True
            raise StoreLostError("the store of the nodes does not answer") from None
        if error is not None:
            raise error
        found: T = answer
        return found


class KeyWatcher:
    """A thread that checks whether a key exists, so that the caller never blocks."""

    def __init__(self, store: Store, *, default: bool) -> None:
        """Check in `store`, which has no other user; return `default` if that fails."""
        self._store, self._default = store, default
        self._found: dict[str, bool] = {}
        self._checking: threading.Thread | None = None

    def has(self, key: str) -> bool:
        """Return whether the key is known to exist; wait a moment for the first answer."""
        if not self._found.get(key) and (self._checking is None or not self._checking.is_alive()):
            self._checking = threading.Thread(target=self._check, args=(key,), daemon=True)
            self._checking.start()
            self._checking.join(_MOMENT)
        return self._found.get(key, False)

    def _check(self, key: str) -> None:
        try:
            self._found[key] = self._store.check([key])
        except RuntimeError:
            self._found[key] = self._default
