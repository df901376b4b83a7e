"""Runs that resume under another engine and on another number of ranks, with equal losses."""

import pytest

from tests.torch_engines.runs import ALONE, DDP, FSDP2, HYBRID, TOLERANCE, begin, losses, train

FSDPCTL = ["engine=fsdpctl"]
WAYS = [
    ((FSDP2, 2), (FSDPCTL, 2)), ((FSDPCTL, 2), (FSDP2, 2)), ((FSDP2, 2), (FSDPCTL, 3)),
    ((FSDPCTL, 3), (HYBRID, 4)), ((HYBRID, 4), (DDP, 2)),
    ((DDP, 3), ([*FSDPCTL, "strategy=shard_optimizer"], 2)), ((ALONE, 2), (FSDPCTL, 1)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumes_under_another_engine(way, tmp_path):
    (first, ranks), (then, other_ranks) = way
    train(world_size=2, starts=[begin(tmp_path, 2, "undisturbed", "train.steps=8")])
    train(world_size=ranks, starts=[begin(tmp_path, ranks, "run", "train.steps=4", *first)])
    more = ["train.steps=8", *then]
    train(world_size=other_ranks, starts=[begin(tmp_path, other_ranks, "run", *more)])
    expected = losses(tmp_path / "undisturbed")
    assert len(expected) == 8
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=TOLERANCE)
