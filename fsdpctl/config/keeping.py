"""What a run leaves behind while it goes on: checkpoints, and figures for other tools."""

from dataclasses import dataclass

from fsdpctl.config.keys import key


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When the state is saved."""

    every: int = key(100, "steps between checkpoints; 0: only at the end", minimum=0)
    keep_last: int = key(2, "newest checkpoints kept; 0: all", minimum=0)
    keep_every: int = key(0, "and those of every so many steps; 0: none", minimum=0)
    mode: str = key("async", "async writes while training goes on", choices=("async", "sync"))
    after_save: str | None = key(
        None,
        "command run on each checkpoint, which is its last argument; only typed, never in a recipe",
        optional=True,
        is_executed=True,
    )
    after_save_timeout: float = key(
        3600.0, "seconds after which such a command is ended", minimum=1, maximum=1e6
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Other tools that are told the figures, and what is kept of failures."""

    tensorboard: bool = key(False, "write them for TensorBoard into the run's directory")
    wandb: bool = key(False, "send them to Weights & Biases; WANDB_MODE=offline keeps them here")
    wandb_project: str | None = key(
        None, "wandb: its project; not set: WANDB_PROJECT, or fsdpctl", optional=True
    )
    memory_snapshot: bool = key(
        False, "CUDA: the snapshot of a failure for want of memory says where each tensor was made"
    )
