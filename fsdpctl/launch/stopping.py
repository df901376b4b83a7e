"""Forwarding of stop requests to the workers.

Note: workers have their own sessions, so Ctrl-C reaches only the launcher. The first request is
forwarded to them as SIGTERM. A worker that is still starting exits without a message; later,
workers finish their step, save and exit. torch's agent is not informed, because its own way of
stopping loses their exit codes. A second Ctrl-C kills the workers; other repeated requests are
ignored.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from fsdpctl.errors import STOP_SIGNALS

_STDERR = 2


class StoppedEarlyError(BaseException):
    """A stop was requested before there were workers to forward it to."""


class StopRequests:
    """A signal handler that forwards the first stop request; a second Ctrl-C kills the workers."""

    def __init__(self, have_begun: Callable[[], bool]) -> None:
        """Handle requests; `have_begun` returns whether workers have been started."""
        self.first: int | None = None
        self._have_begun = have_begun

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        again = self.first is not None
        if again and number != signal.SIGINT:
            return  # schedulers and closing terminals repeat themselves
        self.first = self.first or number
        if number == signal.SIGINT:  # written directly, because a progress bar may own the terminal
            line = b"killing\n" if again else b"stopping after this step; Ctrl-C again kills\n"
            with contextlib.suppress(OSError):  # it may be closed
                os.write(_STDERR, b"\n" + line)
        children = psutil.Process().children()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        if not children and not self._have_begun():
            raise StoppedEarlyError


@contextmanager
def passing_on(have_begun: Callable[[], bool], *, is_last: bool) -> Iterator[StopRequests]:
    """Forward stop requests to the workers while the block runs.

    `have_begun` returns whether there are workers. If `is_last`, requests are ignored after the
    block, when nothing is left to stop.
    """
    requests = StopRequests(have_begun)
    # A signal may be ignored, for example because of nohup.
    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, requests.handle) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_last else handler)
