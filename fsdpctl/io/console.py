"""A console for long runs."""

import os
import re
import time
from pathlib import Path
from typing import IO, Any

from rich.console import Console

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class PatientConsole(Console):
    """Falls silent when whoever reads it goes away, or there is no room; the run goes on."""

    def __init__(self, *, stderr: bool = False, **about: Any) -> None:
        """As rich's, on standard output or `stderr`."""
        super().__init__(stderr=stderr, **about)

    @property
    def file(self) -> IO[str]:
        """Where it prints to."""
        return _Patient(super().file)  # type: ignore[return-value]  # all that rich uses of it

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


class _Patient:
    """A text stream whose failures are nobody's concern."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream  # None where the descriptor was closed before Python began

    def write(self, text: str) -> int:
        """Write it if that is possible."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush it if that is possible."""
        self._try("flush")

    def _try(self, name: str, *args: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, name)(*args)
        except OSError:
            _send_nowhere(self._stream)
        except ValueError:
            pass  # it was closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _send_nowhere(stream: IO[str]) -> None:
    """What the stream still keeps, and what comes, is dropped: it would fail again at exit."""
    try:
        descriptor, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def printable(text: str) -> str:
    """Without what would steer a terminal: names and texts of others may hold it."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", text)


def journal(log: Path, text: str) -> None:
    """Add lines, with the time, to a log; what it has no room for is left out."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = "".join(f"{now} {line}\n" for line in printable(text).splitlines())
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError:
        pass
