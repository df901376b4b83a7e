"""Training with PyTorch's engines has the losses of training with fsdpctl's."""

from pathlib import Path

import pytest

from tests.distributed import distributed
from tests.torch_engines.runs import ALONE, DDP, FSDP2, HYBRID, TOLERANCE, begin, losses, train
from tests.training.ranks import lines, new_trainer, plant

KEEPS = [*FSDP2, "strategy=shard_grad_op"]
# Ranks, common settings, and settings of each run that is compared with fsdpctl's engine.
CASES: dict[str, tuple[int, str, list[list[str]]]] = {
    "strategies": (2, "", [FSDP2, KEEPS, ALONE, DDP]),
    "copies": (4, "", [HYBRID, [*HYBRID, "strategy=hybrid_shard_grad_op"]]),
    "one rank": (1, "", [FSDP2, DDP]),
    "rows that do not divide": (
        3, "model.hidden_size=20 model.head_dim=4 model.intermediate_size=22", [FSDP2, DDP],
    ),
    "fewer rows than ranks": (
        4, "model.hidden_size=8 model.intermediate_size=3 model.head_dim=2", [FSDP2, HYBRID, DDP],
    ),
    "tied embeddings": (2, "model.overrides.tie_word_embeddings=true", [FSDP2, DDP]),
    "another architecture": (2, "model=gpt2 model.num_kv_heads=4", [FSDP2, DDP]),
    "clipping, validation, loss in chunks": (
        2, "optimizer.max_grad_norm=0.1 data.val_fraction=0.1 train.eval_every=2 "
        "train.eval_batches=2 train.loss_chunk_tokens=20", [FSDP2, KEEPS, DDP],
    ),
    "reduced every time":
        (2, "accumulation=every train.micro_batch_size=2", [FSDP2, KEEPS, ALONE, DDP]),
    "reduced at last":
        (2, "accumulation=last train.micro_batch_size=2", [FSDP2, KEEPS, ALONE, DDP]),
    "recomputed": (2, "activation_checkpointing=full", [FSDP2, DDP]),
    "recomputed in part": (2, "activation_checkpointing=selective", [FSDP2, DDP]),
    "far prefetch": (2, "prefetch.forward=2 prefetch.backward=2", [FSDP2]),
    "sgd": (2, "optimizer=sgd optimizer.lr=1e-2", [FSDP2, DDP]),
    "bf16": (2, "precision=bf16", [FSDP2, KEEPS]),
}  # fmt: skip


def check(folder: Path, ranks: int, settings: str, runs: list[list[str]], tolerance: float) -> None:
    shared = settings.split()
    each = {"ours": shared, **{" ".join(more): [*shared, *more] for more in runs}}
    starts = [begin(folder, ranks, name, *more) for name, more in each.items()]
    train(world_size=ranks, starts=starts)
    ours = losses(folder / "ours")
    assert len(ours) >= 5
    for name in each:
        assert losses(folder / name) == pytest.approx(ours, rel=tolerance), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_losses_equal_those_of_fsdpctl(case: str, tmp_path: Path) -> None:
    check(tmp_path, *CASES[case], TOLERANCE)


@pytest.mark.slow
def test_autocast_is_bf16_too(tmp_path: Path) -> None:
    check(tmp_path, 2, "precision=bf16", [DDP], 2e-3)
    train(world_size=2, starts=[begin(tmp_path, 2, "fp32", *DDP)])
    narrow, wide = losses(tmp_path / " ".join(DDP)), losses(tmp_path / "fp32")
    assert any(abs(narrow[name] - wide[name]) > 1e-5 for name in wide)


@pytest.mark.slow
def test_blocks_are_compiled(tmp_path: Path) -> None:
    check(tmp_path, 2, "train.compile=true activation_checkpointing=full", [FSDP2, DDP], 1e-5)


@distributed(timeout=240)
def train_with_accidents(rank: int, world_size: int, starts: list[list[str]]) -> None:
    for typed in starts:
        trainer = new_trainer(typed)
        with plant(trainer, {1: ("loss", 1), 4: ("gradient", 0)}):
            trainer.run()


@pytest.mark.slow
def test_non_finite_steps_are_handled(tmp_path: Path) -> None:
    more = ["train.on_nonfinite=skip", "train.steps=6"]
    each = {"ours": [], "fsdp2": FSDP2, "ddp": DDP}
    starts = [begin(tmp_path, 2, name, *engine, *more) for name, engine in each.items()]
    train_with_accidents(world_size=2, starts=starts)
    for name in each:
        bad = [line["rejected_step"] for line in lines(tmp_path / name) if "rejected_step" in line]
        reasons = [(one["reason"], one["rank"]) for one in bad]
        assert reasons == [("nonfinite_loss", 1), ("nonfinite_grad", 0)]
        ours = losses(tmp_path / "ours")
        assert losses(tmp_path / name) == pytest.approx(ours, rel=TOLERANCE, nan_ok=True)


@pytest.mark.slow
def test_unknown_metrics_of_an_engine_are_null(tmp_path: Path) -> None:
    each = {"ours": [], "fsdp2": FSDP2, "ddp": DDP, "copies": ALONE}
    train(world_size=2, starts=[begin(tmp_path, 2, name, *more) for name, more in each.items()])
    key = "exposed_communication_seconds"
    waits = {name: [x[key] for x in lines(tmp_path / name) if "loss" in x][:5] for name in each}
    for name in ("ours", "fsdp2", "ddp"):
        assert all(seconds > 0 for seconds in waits[name]), name
    assert waits["copies"] == [None] * 5  # sums over replicas cannot be observed
