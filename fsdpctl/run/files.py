"""Names of the files in a run directory, besides its configuration and checkpoints."""

import os
from pathlib import Path

RUNS = "runs"  # the folder of runs without a given directory
OVERRIDES, METRICS, LOGS = "overrides.txt", "metrics.jsonl", "logs"
LOG = f"{LOGS}/node-00000.log"
LOCK = "lock"
HEARTBEAT, ENVIRONMENT = "heartbeat.json", "environment.json"
TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id.txt"


def replace_text(path: Path, text: str) -> None:
    """Replace the contents of `path` atomically: readers see the old or the new text.

    Raises:
        OSError: If the file cannot be written.
    """
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
