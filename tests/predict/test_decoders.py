"""Estimates of decoders of transformers are those of a real step."""

from pathlib import Path

import pytest
import torch

from fsdpctl.comm.collectives import collectives_for
from fsdpctl.resolve.machine import placed_on_cluster
from fsdpctl.resolve.rules import checked
from fsdpctl.train.assemble import make_model
from fsdpctl.train.optimizers import make_optimizer
from tests.distributed import distributed
from tests.models.decoders import compose, save_decoder
from tests.predict.test_total import predicted
from tests.predict.watch import watched_step
from tests.train_step import train_step

FAMILIES = ["qwen3_moe", "mixtral", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_next", "granite"]
WORDS = [
    "model.init=random", "launch.device=cpu", "train.seq_len=64", "train.micro_batch_size=2",
    "train.loss_chunk_tokens=50", "accumulation.steps=1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", ["none", "selective", "full", "full, on the host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=2, timeout=240)
def test_the_peak_of_all_tensors_is_within_a_percent(
    rank: int, world_size: int, family: str, precision: str, recomputes: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    if rank == 0:
        save_decoder(family, folder, vocab_size=1000)
    collectives_for(torch.device("cpu")).barrier()
    words = [f"launch.nproc_per_node={world_size}", f"train.global_batch_size={2 * world_size}"]
    mode, _, sends = recomputes.partition(", ")
    chosen = [f"precision={precision}", f"activation_checkpointing={mode}"]
    chosen += [f"activation_checkpointing.offload={str(bool(sends)).lower()}"]
    config = checked(placed_on_cluster(compose(folder, *WORDS, *words, *chosen)))
    model = make_model(config, torch.device("cpu"))
    optimizer = make_optimizer(config, model)
    peak, events = watched_step(model, lambda: train_step(config, model, optimizer))
    expected, planned, _ = predicted(config, rank, model)
    assert events[: len(planned)] == planned
    assert abs(expected / peak - 1) <= 0.01, (expected, peak)
