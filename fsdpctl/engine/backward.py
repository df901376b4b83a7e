"""Which backward autograd is running, and whether the last one came to its end."""

import weakref
from collections.abc import Callable

import torch

_NONE = -1


def current_backward() -> int:
    """The number of the backward that autograd runs on this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return current_backward() != _NONE


class OutermostBackward:
    """The backward that others may be nested in, as re-entrant checkpointing nests them."""

    def __init__(self) -> None:
        self._number = _NONE
        self._ending: weakref.ref[_Ending] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether one has begun and not ended well."""
        return self._number != _NONE

    @property
    def is_live(self) -> bool:
        """Whether one has begun and neither ended nor failed."""
        return self._ending is not None and self._ending() is not None

    @property
    def is_running_here(self) -> bool:
        """Whether autograd is in it, and not in one nested in it."""
        return self._number == current_backward() != _NONE

    @property
    def has_failed(self) -> bool:
        """Whether it ended in an exception: autograd has let go of what it would call."""
        return self.has_begun and (self._ending is None or self._ending() is None)

    def begin(self, on_end: Callable[[], None]) -> None:
        """Take the running one for it, and have `on_end()` called when it has done all."""
        self._number = current_backward()
        ending = _Ending(on_end)
        self._ending = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def end(self) -> None:
        """It is over, or forgotten."""
        self._number = _NONE
        self._ending = None

    @staticmethod
    def keeps_graph() -> bool:
        """Whether the running one can be done again."""
        return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class _Ending:
    """Autograd owns the only reference to it."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()
