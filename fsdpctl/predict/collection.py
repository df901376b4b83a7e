"""Keeps Python's garbage collector out of work that makes many small objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, nothing is collected: going through all of torch's objects takes a tenth of a second.

    What is observed inside dies when its last reference does, and not at some other time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
