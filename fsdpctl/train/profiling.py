"""A Chrome trace of some steps, in which units and collectives have names."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from fsdpctl.engine.model import ShardedModel

FOLDER = "profile"
_SKIPPED, _TRACED = 2, 3  # steps: a first one makes states, a second starts the tracer


class Profiler(Protocol):
    """What is told of every step."""

    def step(self) -> None:
        """A step is over."""
        ...


class _NoProfiler:
    def step(self) -> None:
        """Nobody listens."""


def profiled(
    model: ShardedModel, run_dir: Path, rank: int, steps: range
) -> AbstractContextManager[Profiler]:
    """A block of `steps`, whose third to fifth are traced, or all if there are fewer.

    The file is `profile/from-step-S-rank-N.json`. Open the file in https://ui.perfetto.dev or chrome://tracing.
    """
    model.name_ranges(is_on=True)
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)

    def write(traced: profile) -> None:
        traced.export_chrome_trace(str(folder / f"from-step-{steps.start}-rank-{rank}.json"))
        model.name_ranges(is_on=False)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=_schedule(len(steps)),
        on_trace_ready=write,
    )


def _schedule(steps: int) -> Callable[[int], ProfilerAction]:
    first = _SKIPPED if steps >= _SKIPPED + _TRACED else 0
    last = min(first + _TRACED, steps) - 1

    def action(step: int) -> ProfilerAction:
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        if first <= step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == first - 1 else ProfilerAction.NONE

    return action


def not_profiled() -> AbstractContextManager[Profiler]:
    """A block without a trace."""
    return nullcontext(_NoProfiler())
