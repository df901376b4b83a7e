"""What lies in a run directory beside its configuration and checkpoints."""

import os
from pathlib import Path

RUNS = "runs"  # the folder of runs whose directory was not given
OVERRIDES, METRICS, LOGS = "overrides.txt", "metrics.jsonl", "logs"
LOG = f"{LOGS}/node-00000.log"
LOCK = "lock"
ALIVE, ENVIRONMENT = "alive.json", "environment.json"
TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id.txt"


def replace_text(path: Path, text: str) -> None:
    """Have `path` say `text` from one moment to the next; readers see the old or the new.

    Raises:
        OSError: it cannot be written.
    """
    scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
