"""Collects the activities that a process shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fsdpctl.io import activity


@contextmanager
def shown_activities() -> Iterator[list[activity._Activity]]:
    """Collect the activities that begin in the block."""
    seen: list[activity._Activity] = []

    def recorded_activity(*options: object) -> activity._Activity:
        seen.append(real(*options))  # type: ignore[arg-type]  # as `doing` calls it
        return seen[-1]

    real = activity._Activity
    with mock.patch.object(activity, "_Activity", recorded_activity):
        yield seen
