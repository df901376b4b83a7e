"""The output of a command that starts a run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple


class Talk(NamedTuple):
    """Functions that print for a command."""

    say: Callable[[str], None]  # a line of its result
    note: Callable[[str], None]  # a line about its progress
    rows: Callable[[], AbstractContextManager[Callable[[int], None]]]  # count of conversations
