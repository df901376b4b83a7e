"""The progress display of rank 0: a bar on a terminal, plain lines elsewhere."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdpctl.io.activity import DISPLAY, QUIET, doing
from fsdpctl.io.terminal import LenientConsole, append_to_log, wrapped
from fsdpctl.io.texts import format_bytes, printable

if TYPE_CHECKING:
    from fsdpctl.run.step_metrics import PeakMemory, StepMetrics

_GIB = 1 << 30


def format_seconds(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss."""
    minutes, secs = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


class ProgressDisplay:
    """The progress of a run on standard output; silent unless `shows`."""

    def __init__(
        self, total_steps: int, first_step: int, *, log_every: int, shows: bool, log: Path | None
    ) -> None:
        """Also write permanent lines to `log`, even if standard output is closed."""
        self._log = log if shows else None
        self._total, self._log_every = total_steps, log_every
        self._bar: Progress | None = None
        self._steps_here = 0
        self._bar_text = ""  # loss and speed of the newest step, in the bar
        self._began = time.monotonic()
        self._startup = ExitStack()  # shows an activity until a step is complete
        self._console = LenientConsole(highlight=False, soft_wrap=True, quiet=not shows)
        self._hides_remarks = bool(os.environ.get(QUIET))  # neither the bar nor remarks are shown
        if shows and not self._hides_remarks and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[note]}", markup=False),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self._console,
                refresh_per_second=4,
            )
            self._bar.add_task("", total=total_steps, completed=first_step, note="")

    def start(self, *, compiles: bool = False) -> None:
        """Show the bar, and an activity until the first step is complete."""
        compiling = "compiling, and " if compiles else ""
        self._startup.enter_context(doing(f"{compiling}computing the first step"))
        if self._bar is not None:
            DISPLAY.attach_bar(self._note)
            self._bar.start()

    def stop(self, *, is_complete: bool = True) -> None:
        """Leave the bar of a complete run on the terminal; after an error, erase it."""
        self._startup.close()
        if self._bar is not None:
            DISPLAY.attach_bar(None)
            self._bar.live.transient = not is_complete
            self._bar.stop()

    def _note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], note=text or self._bar_text)

    def step(self, metrics: "StepMetrics", fraction_written: float | None) -> None:
        """Show a completed step, and the written fraction of a checkpoint in progress, if any."""
        self._steps_here += 1
        DISPLAY.end_startup()
        self._startup.close()
        saving = "" if fraction_written is None else f"  saving {fraction_written:.0%}"
        is_due = metrics.step % self._log_every == 0 or metrics.step == self._total
        if self._bar is not None:
            self._bar_text = (
                f"loss {metrics.stats.loss:.3f}  {_means_text(metrics)}{_speed(metrics)}  "
                f"{_mfu(metrics)}{_memory(metrics.memory)}{saving}"
            )
            self._bar.update(self._bar.task_ids[0], completed=metrics.step, note=self._bar_text)
        elif is_due or self._steps_here == 1:
            seconds = (time.monotonic() - self._began) / self._steps_here
            eta = format_seconds(seconds * (self._total - metrics.step))
            self.say(
                f"step {metrics.step}/{self._total}  {_step_text(metrics)}  "
                f"{_memory(metrics.memory)}{saving}  {eta} left"
            )

    @contextmanager
    def stream(self) -> Iterator[Callable[[str], None]]:
        """Print a permanent text in pieces: yield a function that prints the next piece."""
        pieces: list[str] = []

        def write(piece: str) -> None:
            pieces.append(piece)
            if not self._console.quiet:
                self._console.file.write(printable(piece))
                self._console.file.flush()

        yield write
        write("\n")
        if self._log is not None:
            append_to_log(self._log, "".join(pieces))

    def say(self, line: str, *, is_remark: bool = False) -> None:
        """Print a permanent line. A remark is neither a result nor a warning; `-q` hides it."""
        if not (is_remark and self._hides_remarks):
            text, console = printable(line), self._console
            text = wrapped(text, console.width) if console.is_terminal else text
            console.print(text, markup=False)
        if self._log is not None:
            append_to_log(self._log, line)


def _step_text(metrics: "StepMetrics") -> str:
    stats, per_rank = metrics.stats, ""
    if metrics.memory.total:  # a GPU's; on a CPU, the line stays below 100 columns
        per_rank = f" ({metrics.tokens_per_second_per_rank:,.0f} per rank)"
    return (
        f"loss {stats.loss:.3f}  {_means_text(metrics)}grad_norm {stats.grad_norm:.2f}  "
        f"lr {metrics.lr:.2g}  {_speed(metrics)}{per_rank}  {_mfu(metrics)}".rstrip()
    )


def _means_text(metrics: "StepMetrics") -> str:
    return "".join(f"{name} {x:.4g}  " for name, x in metrics.named_means.items() if x is not None)


def _speed(metrics: "StepMetrics") -> str:
    return f"{metrics.tokens_per_second:,.0f} {'tok' if metrics.has_tokens else 'samples'}/s"


def _mfu(metrics: "StepMetrics") -> str:
    return "" if metrics.mfu is None else f"{metrics.mfu:.1%} MFU  "


def _memory(memory: "PeakMemory") -> str:
    if memory.total is None:
        return format_bytes(memory.reserved)
    share = memory.reserved / memory.total
    return f"{memory.reserved / _GIB:.1f}/{memory.total / _GIB:.1f} GiB ({share:.0%})"
