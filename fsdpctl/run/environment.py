"""What each start of a run ran on: environment.json."""

import contextlib
import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from fsdpctl import __version__
from fsdpctl.errors import UsageError
from fsdpctl.run.files import ENVIRONMENT, OVERRIDES, replace_text
from fsdpctl.run.git import revision
from fsdpctl.run.starts import MOST_STARTS, read_starts

# Of the environment's variables only what decides how ranks compute and talk: others have secrets.
_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, and what it computes on."""

    host: str
    device: str


def place_of(device: torch.device) -> Place:
    """This rank's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Place(socket.gethostname(), name)


def describe_start(run_dir: Path, places: Sequence[Place]) -> dict[str, Any]:
    """The entry of this start.

    Args:
        run_dir: where what was typed lies.
        places: every rank's.
    """
    at = revision(Path.cwd())
    on_cuda = torch.cuda.is_available()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": _typed(run_dir),
        "fsdpctl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda if on_cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if on_cuda else None,
        "ranks": len(places),
        "hosts": list(dict.fromkeys(each.host for each in places)),
        "devices": dict(Counter(each.device for each in places)),
        "git": None if at is None else asdict(at),
        "variables": relevant(os.environ),
    }


def relevant(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that are written down."""
    return {
        name: text
        for name, text in sorted(variables.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def add_start(run_dir: Path, start: Mapping[str, Any]) -> None:
    """Append a start; of many the oldest go. What cannot be written or read is left out."""
    with contextlib.suppress(OSError):
        try:
            starts = read_starts(run_dir)
        except UsageError:
            starts = []  # nobody can read it
        text = json.dumps({"starts": [*starts, start][-MOST_STARTS:]}, indent=1)
        replace_text(run_dir / ENVIRONMENT, f"{text}\n")


def _typed(run_dir: Path) -> list[str]:
    try:
        return (run_dir / OVERRIDES).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
