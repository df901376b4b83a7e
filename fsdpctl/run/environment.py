"""environment.json (software, hardware and events of each start of a run), and estimate.json."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.config.recipe import read_recipe
from fsdpctl.errors import UsageError
from fsdpctl.io import files
from fsdpctl.io.files import nearest_run_hint, read_text_file
from fsdpctl.io.packages import versions
from fsdpctl.io.run_files import ENVIRONMENT, ESTIMATE, OVERRIDES_FILE, RUN_CONFIG, check_run_files
from fsdpctl.io.untrusted import Count, as_type, read_json
from fsdpctl.run.metrics import NonNegative

if TYPE_CHECKING:
    import torch

MAX_STARTS = 20  # older starts are dropped
StartRecord = Mapping[str, Any]  # software, hardware and events of one start
EVENTS_KEY = "record"  # key of the StartEvents in a StartRecord
# Only the variables that affect how ranks compute and communicate: others may hold secrets.
_VARIABLES = re.compile(r"(NCCL|(PY)?TORCH)_|(CUDA_VISIBLE_DEVICES|OMP_(NUM_THREADS|WAIT_POLICY))$")
_GIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _EnvironmentFile:
    starts: list[dict[str, Any]] = field(default_factory=list)


def read_settings(run_dir: Path) -> dict[str, str]:
    """Read the settings of a run as text, without torch; UsageError if `run_dir` is not a run."""
    if not run_dir.exists():
        raise UsageError(f"{run_dir}: not found{nearest_run_hint(run_dir)}")
    check_run_files(run_dir)
    if not (run_dir / RUN_CONFIG).is_file():
        raise UsageError(f"{run_dir}: not a run of fsdpctl ({RUN_CONFIG} not found)")
    return dict(read_recipe(run_dir / RUN_CONFIG))


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Read all starts, oldest first; an empty list if the file does not exist."""
    path = run_dir / ENVIRONMENT
    return read_json(path, _EnvironmentFile).starts if os.path.lexists(path) else []


def newest_versions(run_dir: Path) -> dict[str, str]:
    """Read the versions of the newest start by package; empty if they are unknown."""
    with contextlib.suppress(UsageError):
        newest = (read_starts(run_dir) or [{}])[-1]
        return {name: newest[name] for name in versions() if isinstance(newest.get(name), str)}
    return {}


def add_start(run_dir: Path, record: StartRecord) -> None:
    """Append a start and drop the oldest starts. Failures are ignored."""
    starts: list[StartRecord] = []
    with contextlib.suppress(UsageError):  # an unreadable file is replaced
        starts += read_starts(run_dir)
    _write(run_dir, [*starts, record][-MAX_STARTS:])


def write_start_events(run_dir: Path, events: Mapping[str, Any]) -> None:
    """Write the events of the newest start. Failures are ignored."""
    with contextlib.suppress(UsageError):
        *older, newest = read_starts(run_dir) or [{}]
        _write(run_dir, [*older, {**newest, EVENTS_KEY: events}])


def _write(run_dir: Path, starts: Sequence[StartRecord]) -> None:
    with contextlib.suppress(OSError):
        files.write_atomic(run_dir / ENVIRONMENT, json.dumps({"starts": starts}, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Restart:
    """The cause and the cost of a restart."""

    number: Count
    reason: str
    failed_at: NonNegative  # seconds since the epoch
    lost_steps: Count  # completed before the failure, and repeated
    step: Count = 0  # first completed step after the restart
    seconds_to_next_step: NonNegative = 0.0  # time since the failure


@dataclass(frozen=True, slots=True)
class StartEvents:
    """The events of one start."""

    step: Count | None = None  # step of the loaded checkpoint; None: failed before loading
    restart: Restart | None = None  # None until restarted ranks have completed a step
    warnings: list[str] = field(default_factory=list)
    longest_save_seconds: NonNegative = 0.0


def read_start_events(run_dir: Path) -> list[StartEvents]:
    events = [each.get(EVENTS_KEY, {}) for each in read_starts(run_dir)]
    return as_type(events, list[StartEvents], str(run_dir / ENVIRONMENT))


def device_name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_start(run_dir: Path, devices: Sequence[str]) -> dict[str, Any]:
    import torch
    from torch.cuda import nccl

    overrides, has_cuda = list[str](), torch.cuda.is_available()
    with contextlib.suppress(UsageError):
        overrides = read_text_file(run_dir / OVERRIDES_FILE).splitlines()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": overrides,
        **versions(),
        "cuda": torch.version.cuda if has_cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if has_cuda else None,
        "devices": dict(Counter(devices)),
        "commit": git_commit(Path.cwd()),
        "variables": relevant_variables(os.environ),
    }


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in sorted(variables.items()) if _VARIABLES.match(name)}


def git_commit(folder: Path) -> str | None:
    """Return the commit of the git checkout that `folder` is in, or None.

    `git rev-parse` runs no program that a repository's configuration names.
    """
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    try:
        process = subprocess.run(
            ["git", "-c", "safe.directory=*", "rev-parse", "--verify", "HEAD"],
            cwd=folder, env=environment, timeout=_GIT_SECONDS, check=True,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


@dataclass(frozen=True, slots=True)
class SavedEstimate:
    """The estimated peak memory of the rank that needs most, and the predicted step time."""

    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    predicted_step_seconds: float | None = None
    prediction_source: str = ""  # source of the hardware specs


def read_estimate(run_dir: Path) -> SavedEstimate | None:
    """Return the run's saved estimate, or None if the file is missing or invalid."""
    try:
        return read_json(run_dir / ESTIMATE, SavedEstimate)
    except UsageError:
        return None  # only reports use the estimate
