"""Training on PyTorch's engines against training on ours: one loop, and the same losses."""

import json
from pathlib import Path

import pytest

from tests.distributed import distributed
from tests.train.ranks import made, words

TOLERANCE = 1e-6  # of losses; ranks' gradients are added in another order


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@distributed(timeout=150)
def train(rank: int, world_size: int, typed: list[str]) -> None:
    made(typed).run()


def losses_of(folder: Path, ranks: int, name: str, *more: str) -> list[float]:
    run_dir = folder / name
    typed = words(folder, ranks, "train.steps=6", f"train.run_dir={run_dir}", *more)
    train(world_size=ranks, typed=typed)
    return losses(run_dir)


CASES = {
    "fsdp2, full_shard": (2, ["engine=fsdp2"]),
    "fsdp2, shard_grad_op": (2, ["engine=fsdp2", "strategy=shard_grad_op"]),
    "fsdp2, copies": (4, ["engine=fsdp2", "strategy=hybrid_shard", "strategy.dp_shard_size=2"]),
    "fsdp2, a copy a rank": (
        2,
        ["engine=fsdp2", "strategy=hybrid_shard", "strategy.dp_shard_size=1"],
    ),
    "fsdp2, rows that do not divide": (3, ["engine=fsdp2"]),
    "fsdp2, one rank": (1, ["engine=fsdp2"]),
    "ddp": (2, ["engine=ddp", "strategy=no_shard"]),
    "ddp, one rank": (1, ["engine=ddp", "strategy=no_shard"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_losses_are_those_of_our_engine(case: str, tmp_path: Path) -> None:
    ranks, engine = CASES[case]
    ours = losses_of(tmp_path, ranks, "ours")
    theirs = losses_of(tmp_path, ranks, "theirs", *engine)
    assert len(ours) == 6
    assert theirs == pytest.approx(ours, rel=TOLERANCE)
