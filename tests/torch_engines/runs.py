"""Runs of tiny models under any engine, on ranks that this process starts."""

from pathlib import Path

from tests.commands.run import figures
from tests.distributed import distributed
from tests.training.ranks import new_trainer, run_args

FSDP2, DDP = ["engine=fsdp2"], ["engine=ddp", "strategy=no_shard"]
HYBRID = [*FSDP2, "strategy=hybrid_shard", "strategy.dp_shard_size=2"]
ALONE = [*FSDP2, "strategy=hybrid_shard", "strategy.dp_shard_size=1"]  # each rank with a copy
TOLERANCE = 1e-6  # of losses in fp32: engines add up ranks' gradients in another order


@distributed(timeout=240)
def train(rank: int, world_size: int, starts: list[list[str]]) -> None:
    """Complete the runs, one after the other."""
    for typed in starts:
        new_trainer(typed).run()


def begin(folder: Path, ranks: int, name: str, *more: str) -> list[str]:
    """Return the settings of a run."""
    return run_args(folder, ranks, "train.steps=5", f"train.run_dir={folder / name}", *more)


def losses(run_dir: Path) -> dict[str, float]:
    """Return every loss and validation loss of a run, by step."""
    by_step: dict[str, float] = {}
    for step, *values in figures(run_dir):
        kinds = zip(("loss", "validation loss"), values, strict=True)
        by_step |= {f"{kind} of step {step}": loss for kind, loss in kinds if loss is not None}
    return by_step
