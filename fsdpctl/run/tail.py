"""The end of metrics.jsonl, which may have a million lines: as much of it as a look takes."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, parse_json
from fsdpctl.io.files import open_regular
from fsdpctl.run.files import METRICS

_MOST_BYTES = 16 * MIB  # some thirty thousand steps
_MOST_OTHERS = 10_000
_RECENT = 50  # steps
_MOST_WARNINGS = 5
_OF_A_STEP = b'"tokens_per_second"'
_NOT_FINITE = (b'"loss": null', b'"grad_norm": null')


@dataclass(frozen=True, slots=True)
class Line:
    """What is looked at of a line."""

    step: int
    loss: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_rank: float | None = None
    mfu: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    val_loss: float | None = None
    warning: str | None = None
    restart: Any = None  # of whatever form: it is counted
    bad_numbers: Any = None


@dataclass(frozen=True, slots=True)
class Tail:
    """What the end of the file says."""

    since_step: int = 0  # what is counted is counted from here on
    written: float | None = None  # when its last line was, in seconds since the epoch
    steps: list[Line] = field(default_factory=list)  # the newest, in order
    validation: Line | None = None
    skipped_steps: int = 0  # that were not applied, for their loss or gradient
    restarts: int = 0
    warnings: list[Line] = field(default_factory=list)  # the newest, in order

    def recent(self, of: Callable[[Line], float | None]) -> float | None:
        """The median over the newest steps; None where no step has it."""
        found = [value for line in self.steps if (value := of(line)) is not None]
        return median(found) if found else None


def read_tail(run_dir: Path) -> Tail:
    """The end of the run's metrics.jsonl; empty where there is none yet.

    Raises:
        UsageError: it is damaged.
    """
    path = run_dir / METRICS
    if not os.path.lexists(path):
        return Tail()
    lines, written = _last_lines(path)
    if not lines:
        return Tail(written=written)
    steps = [line for line in lines if _OF_A_STEP in line]
    # Few lines are of anything else; a damaged one may be taken for such a line.
    rare = [line for line in lines if _OF_A_STEP not in line][-_MOST_OTHERS:]
    others = [_parsed(line, path) for line in rare]
    return Tail(
        since_step=_parsed(lines[0], path).step,
        written=written,
        steps=[_parsed(line, path) for line in steps[-_RECENT:]],
        validation=next((each for each in reversed(others) if each.val_loss is not None), None),
        skipped_steps=max(
            sum(any(mark in line for mark in _NOT_FINITE) for line in steps),
            sum(each.bad_numbers is not None for each in others),
        ),
        restarts=sum(each.restart is not None for each in others),
        warnings=[each for each in others if each.warning][-_MOST_WARNINGS:],
    )


def _last_lines(path: Path) -> tuple[list[bytes], float]:
    """The last whole lines, and when the file was written to."""
    with open(open_regular(path), "rb") as file:
        try:
            about = os.fstat(file.fileno())
            start = max(0, about.st_size - _MOST_BYTES)
            file.seek(start)
            content = file.read(_MOST_BYTES)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
    return list(_whole_lines(content, is_cut=start > 0)), about.st_mtime


def _whole_lines(content: bytes, *, is_cut: bool) -> Iterator[bytes]:
    """Those between the first line end, if the start was cut off, and the last: a line that is
    just being written has none."""
    start = content.find(b"\n") + 1 if is_cut else 0
    yield from content[start : content.rfind(b"\n") + 1].split(b"\n")[:-1]


def _parsed(line: bytes, path: Path) -> Line:
    try:
        return parse_json(line, Line, str(path))
    except UsageError:
        raise UsageError(f"{path}: damaged: its end has a line that is none of ours") from None
