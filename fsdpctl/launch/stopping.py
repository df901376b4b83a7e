"""Requests to stop, passed on to the workers.

Note: workers have sessions of their own, so Ctrl-C reaches only the launcher. The first request is
passed on to them as SIGTERM, on which a worker that only begins says nothing; later they finish
their step, save and exit by themselves. torch's agent is not told, because its own way of stopping
loses their exit codes. A second Ctrl-C kills them; other repeated requests change nothing.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
_STDERR = 2


class StoppedEarlyError(BaseException):
    """A request to stop came before there were workers to pass it on to."""


class StopRequests:
    """Passes the first request to stop on to the workers; a second Ctrl-C kills them."""

    def __init__(self, have_begun: Callable[[], bool]) -> None:
        """`have_begun` tells whether there are workers, or were."""
        self.first: int | None = None
        self._have_begun = have_begun

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What Python calls with a signal."""
        again = self.first is not None
        if again and number != signal.SIGINT:
            return  # schedulers and closing terminals repeat themselves
        self.first = self.first or number
        if number == signal.SIGINT:  # written as it is: a progress bar may own the terminal
            said = b"killing\n" if again else b"stopping after this step; Ctrl-C again kills\n"
            with contextlib.suppress(OSError):  # it may be closed
                os.write(_STDERR, b"\n" + said)
        children = psutil.Process().children()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        if not children and not self._have_begun():
            raise StoppedEarlyError


@contextmanager
def passing_on(have_begun: Callable[[], bool], *, is_last: bool) -> Iterator[StopRequests]:
    """Handle the signals that ask to stop while the block runs.

    `is_last`: once the workers have ended, so that nothing is left to be stopped, they are ignored.
    """
    requests = StopRequests(have_begun)
    heard = [each for each in STOPPING if signal.getsignal(each) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, requests.handle) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_last else handler)
