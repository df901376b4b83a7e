"""What rank 0 shows while a run goes on: a bar on a terminal, plain lines elsewhere."""

import math
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fsdpctl.io.console import PatientConsole, journal, printable

if TYPE_CHECKING:
    from fsdpctl.run.metrics import PeakMemory, StepMetrics

_GIB = 1 << 30
_MIB = 1 << 20
_TELL_EVERY = 10.0  # seconds, in plain lines


def format_bytes(count: float) -> str:
    """In GiB or MiB, with the unit."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def format_seconds(seconds: float) -> str:
    """As h:mm:ss or m:ss."""
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class RunProgress:
    """Shows a run's progress on standard output; silent on all ranks but 0."""

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        *,
        log_every: int,
        shows: bool,
        log: Path | None,
    ) -> None:
        """`log` gets the lines that stay, whether or not somebody can read them."""
        self._log = log if shows else None
        self._console = PatientConsole(highlight=False, soft_wrap=True, quiet=not shows)
        self._total = total_steps
        self._log_every = log_every
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._done_here = 0
        self._began = time.monotonic()
        self._told = 0.0  # after so many seconds of waiting a line was printed
        if shows and self._console.is_terminal:
            self._live = _make_bar(self._console)
            self._task = self._live.add_task("", total=total_steps, completed=first_step, note="")

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, metrics: "StepMetrics", share_saved: float | None) -> None:
        """A step is done; of the checkpoint on its way, if there is one, so much is written."""
        self._done_here += 1
        saving = "" if share_saved is None else f"  saving {share_saved:.0%}"
        if self._live is not None and self._task is not None:
            note = (
                f"loss {metrics.figures.loss:.3f}  {metrics.tokens_per_second:,.0f} tok/s  "
                f"{'' if metrics.mfu is None else _mfu(metrics) + '  '}"
                f"{_memory(metrics.memory)}{saving}"
            )
            self._live.update(self._task, completed=metrics.step, note=note)
        elif metrics.step % self._log_every == 0 or metrics.step == self._total:
            each = (time.monotonic() - self._began) / self._done_here
            left = format_seconds(each * (self._total - metrics.step))
            self.say(
                f"step {metrics.step}/{self._total}  {_figures(metrics)}  "
                f"{_memory(metrics.memory)}{saving}  {left} left"
            )

    def saving(self, share: float, seconds: float) -> None:
        """Training has waited so long for a checkpoint of which so much is written."""
        if seconds < self._told:  # another one
            self._told = 0.0
        if self._live is not None and self._task is not None:
            self._live.update(self._task, note=f"waiting for the checkpoint, {share:.0%} written")
        elif seconds - self._told >= _TELL_EVERY:
            self._told = seconds
            self.say(f"waiting for the checkpoint, {share:.0%} written")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(printable(line), markup=False)
        if self._log is not None:
            journal(self._log, line)


def _figures(metrics: "StepMetrics") -> str:
    figures = metrics.figures
    return (
        f"loss {figures.loss:.3f}  grad_norm {figures.grad_norm:.2f}  lr {metrics.lr:.2g}  "
        f"{_speed(metrics)}  {_mfu(metrics)}"
    )


def _speed(metrics: "StepMetrics") -> str:
    each = f" ({metrics.tokens_per_second_per_rank:,.0f} per rank)" if metrics.num_ranks > 1 else ""
    return f"{metrics.tokens_per_second:,.0f} tok/s{each}"


def _mfu(metrics: "StepMetrics") -> str:
    """As every line has it, so that a program finds it: `n/a` where no peak is known."""
    return "MFU n/a" if metrics.mfu is None else f"{metrics.mfu:.1%} MFU"


def _memory(memory: "PeakMemory") -> str:
    if memory.total is None:
        return format_bytes(memory.reserved)
    share = memory.reserved / memory.total
    return f"{memory.reserved / _GIB:.1f}/{memory.total / _GIB:.1f} GiB ({share:.0%})"


def _make_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        refresh_per_second=4,
    )
