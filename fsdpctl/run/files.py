"""Names of the files in a run directory, besides its configuration and checkpoints."""

import os
from pathlib import Path

RUNS = "runs"  # the folder of runs without a given directory
OVERRIDES, METRICS, LOGS = "overrides.txt", "metrics.jsonl", "logs"
LOG = f"{LOGS}/node-00000.log"
LOCK = "lock"
HEARTBEAT, ENVIRONMENT = "heartbeat.json", "environment.json"
TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id.txt"


def replace_text(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Replace the file at `path` by one with `text`; readers see the old text or the new.

    Args:
        path: The file.
        text: Its content.
        is_durable: Write it to the disk before the replacement, so that it survives a power loss.

    Raises:
        OSError: If the file cannot be written.
    """
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    scratch.replace(path)
