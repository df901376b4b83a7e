"""The starts of a run, as environment.json has them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpctl.io.documents import read_json
from fsdpctl.run.files import ENVIRONMENT

MOST_STARTS = 200


@dataclass(frozen=True, slots=True)
class _File:
    starts: list[dict[str, Any]] = field(default_factory=list)


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """What is written of each, oldest first; empty where there was none.

    Raises:
        UsageError: the file is damaged.
    """
    path = run_dir / ENVIRONMENT
    return read_json(path, _File).starts if os.path.lexists(path) else []
