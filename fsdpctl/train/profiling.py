"""Chrome traces of some steps, in which units and collectives have names."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from fsdpctl.shards import TrainedModel

FOLDER = "profile"
_TRACED = 3  # steps
_SKIPPED = 2  # of a start: a first one makes states, a second starts the tracer
_SKIPPED_LATER = 1


class Tracing:
    """Traces steps while a run goes on, each time into files of its own, one a rank.

    They are `profile/from-step-S-rank-N.json`; https://ui.perfetto.dev and chrome://tracing open
    them. Leaving the block writes what there is of one that is under way.
    """

    def __init__(self, model: TrainedModel, run_dir: Path, rank: int) -> None:
        self._model = model
        self._folder = run_dir / FOLDER
        self._rank = rank
        self._profile: profile | None = None
        self._is_written = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def is_on(self) -> bool:
        """Whether a trace is being made, or about to be."""
        return self._profile is not None

    def begin(self, steps: range, *, later: bool = False) -> None:
        """Trace three of `steps`, which begin now, or all if there are fewer than it takes.

        They are the third to the fifth; `later`, when the run has long begun, the second to fourth.
        """
        self._model.name_ranges(is_on=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"from-step-{steps.start}-rank-{self._rank}.json"

        def write(traced: profile) -> None:
            traced.export_chrome_trace(str(file))
            self._is_written = True

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=_schedule(len(steps), _SKIPPED_LATER if later else _SKIPPED),
            on_trace_ready=write,
        )
        self._profile.start()

    def step(self) -> bool:
        """A step is over; whether a trace is written with that."""
        if self._profile is None:
            return False
        self._profile.step()
        if not self._is_written:
            return False
        self._end()
        return True

    def _end(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._model.name_ranges(is_on=False)
        self._profile, self._is_written = None, False


def _schedule(steps: int, skipped: int) -> Callable[[int], ProfilerAction]:
    first = skipped if steps >= skipped + _TRACED else 0
    last = min(first + _TRACED, steps) - 1

    def action(step: int) -> ProfilerAction:
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        if first <= step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == first - 1 else ProfilerAction.NONE

    return action
