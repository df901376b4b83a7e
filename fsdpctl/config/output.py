"""The output of a run: checkpoints, and metrics for other tools."""

from dataclasses import dataclass

from fsdpctl.config.keys import key


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When checkpoints are saved, and which are kept."""

    every: int = key(100, "steps between checkpoints; 0: only one at the end", minimum=0)
    keep_last: int = key(2, "number of newest checkpoints to keep; 0: all", minimum=0)
    keep_every: int = key(0, "also keep checkpoints of every N-th step; 0: none", minimum=0)
    mode: str = key("async", "async: write in the background", choices=("async", "sync"))
    after_save: str | None = key(
        None,
        "command to run on each checkpoint, its last argument; only accepted on the command line",
        optional=True,
        is_executed=True,
    )
    after_save_timeout: float = key(
        3600.0, "seconds after which checkpoint.after_save is killed", minimum=1, maximum=1e6
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Loggers, and files that are written after failures."""

    tensorboard: bool = key(False, "write metrics for TensorBoard to the run directory")
    wandb: bool = key(
        False, "send metrics to Weights & Biases, or store them if WANDB_MODE=offline"
    )
    wandb_project: str | None = key(
        None, "project in Weights & Biases; not set: WANDB_PROJECT, else fsdpctl", optional=True
    )
    memory_snapshot: bool = key(
        False, "CUDA: record allocations, for a memory snapshot if memory runs out"
    )
