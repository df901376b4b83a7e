"""metrics.jsonl of a run: rank 0 writes one JSON object per line, and all commands read it.

Readers need no torch and treat the file as untrusted: it must be regular, with limited lines.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io import files
from fsdpctl.io.files import is_same_file, open_nofollow, open_regular, os_errors_as
from fsdpctl.io.untrusted import Count

_MAX_LINE = 1 << 20  # bytes
_UNSENT_LINES = 1000  # lines that trackers of a killed run may lack, at most
_TAIL_BYTES = 1 << 16  # end of the file that `last_step` reads
Metric = float | None | UnsetType  # None: not finite; UNSET: not in the line
# At most 1e30, so that sums and quotients are finite.
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e30)]


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """The record of a rejected step in a line."""

    reason: str
    action: str
    rank: Count | None
    loss: float | str  # text if it is not finite
    grad_norm: float | str
    threshold: float | None
    samples: list[Count]
    rank_samples: list[Count]


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """One line of the file, about a step, a validation, or a rejected step."""

    step: Count
    samples: Count | None = None  # consumed, including this step
    loss: Metric = UNSET
    grad_norm: Metric = UNSET
    tokens: Count | None = None
    seconds: NonNegative | None = None
    tokens_per_second: NonNegative | None = None
    samples_per_second: NonNegative | None = None
    mfu: NonNegative | None = None
    exposed_communication_seconds: NonNegative | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    val_loss: Metric = UNSET
    rejected_step: RejectedRecord | None = None

    @property
    def is_step(self) -> bool:
        return self.loss is not UNSET


_DECODER = msgspec.json.Decoder(MetricsLine)


def read_metrics(path: Path, *, last_bytes: int | None = None) -> Iterator[MetricsLine]:
    """Read the lines of metrics.jsonl, or those that begin within its `last_bytes`.

    An incomplete last line, which a killed run leaves, is skipped. UsageError if another line is
    corrupted, or the file cannot be read.
    """
    for _, line in _read(path, last_bytes):
        yield line


def _read(path: Path, last_bytes: int | None = None) -> Iterator[tuple[bytes, MetricsLine]]:
    with open(open_regular(path), "rb") as file, os_errors_as(path):
        start = 0 if last_bytes is None else max(0, file.seek(0, os.SEEK_END) - last_bytes)
        file.seek(start)
        if start:
            file.readline(_MAX_LINE)  # skipped: the beginning of this line is missing
        line_number = 0
        while text := file.readline(_MAX_LINE):
            line_number += 1
            try:
                line = _DECODER.decode(text)
            except (ValueError, RecursionError):
                if not text.endswith(b"\n") and not file.read(1):
                    return
                location = str(path) if start else f"{path}, line {line_number}"
                raise UsageError(f"{location}: corrupted; move the file away") from None
            yield text, line


def last_step(path: Path) -> int:
    """Return the last completed step in metrics.jsonl, or 0."""
    with contextlib.suppress(UsageError):
        return max((line.step for line in read_metrics(path, last_bytes=_TAIL_BYTES)), default=0)
    return 0


def validation_loss_at(path: Path, step: int) -> float | None:
    """Return the finite validation loss of `step` in metrics.jsonl, or None."""
    lines = read_metrics(path) if path.is_file() else ()
    losses = (line.val_loss for line in lines if line.step == step)
    return next((loss for loss in losses if isinstance(loss, float)), None)


class MetricsFile:
    """The file, open for appending. When `write` returns, the operating system has the line."""

    def __init__(self, path: Path, step: int) -> None:
        """Open `path` and remove lines after `step`, the step of the checkpoint."""
        self._path = path
        self.unsent: list[dict[str, Any]] = []  # for trackers: removed lines and some before
        self._writing = threading.Lock()
        # A full disk is not a mistake in the settings.
        with os_errors_as(path, full_disk=FsdpctlError):
            if path.is_file():
                stored, removed = list[bytes](), list[bytes]()
                for text, line in _read(path):
                    # Lines of rejected steps remain: no other file records them.
                    remains = line.step <= step or line.rejected_step is not None
                    (stored if remains else removed).append(text)
                self.unsent = [json.loads(text) for text in (*stored[-_UNSENT_LINES:], *removed)]
                # Also completes a last line without a line feed.
                files.write_atomic(path, b"".join(text.rstrip(b"\n") + b"\n" for text in stored))
            self._file = open_nofollow(path, "ab")

    def write(self, line: dict[str, Any]) -> None:
        """Append one object; FsdpctlError if that fails. Any thread may call it."""
        with os_errors_as(self._path, FsdpctlError), self._writing:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()

    @property
    def is_in_place(self) -> bool:
        return is_same_file(self._path, self._file)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the last `write` has raised the error
            self._file.close()
