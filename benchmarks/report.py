"""What every benchmark writes: its figures, and what they were measured with."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch


def write_report(path: Path | None, benchmark: str, results: object, **about: Any) -> None:
    """Write one benchmark's figures as JSON; nothing where no path is given."""
    if path is None:
        return
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    report = {"benchmark": benchmark, "torch": torch.__version__, "machine": machine}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**report, **about, "results": results}, indent=2) + "\n")
