"""Text streams that tolerate a reader that exits, a full disk, and text beyond their encoding."""

import errno
import os
import stat
from io import RawIOBase
from typing import IO, Any, TextIO

from fsdpctl.errors import FsdpctlError
from fsdpctl.io.activity import DISPLAY

_STDOUT = 1  # descriptor
_READER_EXITED = (errno.EPIPE, errno.ECONNRESET)  # errors if the reader exits, such as `head`


def open_stdout(stream: TextIO) -> "LenientStream":
    """Return standard output as a LenientStream.

    It is buffered even if PYTHONUNBUFFERED is set: an unbuffered stream may write only a part.
    """
    if isinstance(getattr(stream, "buffer", None), RawIOBase):
        encoding = stream.encoding, stream.errors
        stream = open(_STDOUT, "w", -1, *encoding, closefd=False)  # noqa: SIM115  # never closed
    return LenientStream(stream)


class LenientStream:
    """A text stream that records failures instead of raising exceptions."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream  # None if the descriptor was closed before Python started
        self._failure = ""

    def write(self, text: str) -> int:
        DISPLAY.before_output(text)
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def check(self) -> None:
        """Flush the stream. FsdpctlError if text was lost although the reader still exists."""
        self.flush()
        if self._failure:
            result = "the printed text is incomplete; files that the command wrote are complete"
            raise FsdpctlError(f"standard output: {self._failure}; {result}")

    def _try(self, name: str, *args: str) -> None:
        try:
            getattr(self._stream, name)(*args)
        except OSError as error:
            if not self._has_no_reader(error):
                self._failure = self._failure or error.strerror or str(error)
            self._redirect_to_null()
        except UnicodeEncodeError as error:
            self._failure = self._failure or f"{error}; set PYTHONUTF8=1"
        except (AttributeError, ValueError):
            pass  # no stream, or a closed stream

    def _has_no_reader(self, error: OSError) -> bool:
        if error.errno != errno.EIO:
            return error.errno in _READER_EXITED
        try:
            return stat.S_ISCHR(os.fstat(self.fileno()).st_mode)  # EIO of a closed terminal
        except (OSError, ValueError):
            return True

    def _redirect_to_null(self) -> None:
        """Drop buffered and future output, which would fail again at exit."""
        try:
            descriptor, null = self.fileno(), os.open(os.devnull, os.O_WRONLY)
        except (OSError, ValueError):
            return
        os.dup2(null, descriptor)
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
