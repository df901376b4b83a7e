"""Estimates of transformers' decoders equal the memory of a real step."""

from pathlib import Path

import pytest
import torch

from fsdpctl.comm.mesh import collectives_for
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.rules import validate
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model, make_optimizer
from tests.distributed import distributed, in_turn
from tests.matrix import fast
from tests.models.decoders import compose, save_decoder
from tests.predict.tensor_bytes import watched_step
from tests.predict.test_total import predicted
from tests.train_step import train_step

FAMILIES = ["qwen3_moe", "mixtral", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_next", "granite"]
ARGS = [
    "model.init=random", "launch.device=cpu", "train.seq_len=64", "train.micro_batch_size=2",
    "train.loss_chunk_tokens=50", "accumulation.steps=1",
]  # fmt: skip
EXPERTS = ["model.lora.rank=8", "model.lora.targets=experts", "model.base_dtype=nf4"]


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", ["none", "selective", "full", "full, on the host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=2, timeout=240)
def test_the_peak_of_all_tensors_is_within_a_percent(
    rank: int, world_size: int, family: str, precision: str, recomputes: str, tmp_path: Path
) -> None:
    mode, _, sends = recomputes.partition(", ")
    chosen = [f"precision={precision}", f"activation_checkpointing={mode}"]
    chosen += [f"activation_checkpointing.offload={str(bool(sends)).lower()}"]
    check(rank, world_size, family, tmp_path / "in", chosen)


@pytest.mark.slow
@pytest.mark.parametrize("family", fast("qwen3_moe", slow=["mixtral", "deepseek_v3", "gpt_oss"]))
@distributed(world_size=2, timeout=240)
@in_turn(mode=["none", "full"], rests=["none", "params"])
def test_the_peak_of_packed_experts_with_adapters_is_within_a_percent(
    rank: int, world_size: int, family: str, mode: str, rests: str, tmp_path: Path
) -> None:
    chosen = [f"activation_checkpointing={mode}", f"strategy.offload={rests}"]
    folder = tmp_path / f"{mode} {rests}"
    check(rank, world_size, family, folder, [*chosen, *EXPERTS], hidden_size=64)


def check(rank: int, ranks: int, family: str, path: Path, chosen: list[str], **sizes: int) -> None:
    if rank == 0:
        save_decoder(family, path, vocab_size=1000, **sizes)
    collectives_for(torch.device("cpu")).barrier()
    args = [f"launch.nproc_per_node={ranks}", f"train.global_batch_size={2 * ranks}"]
    config = stored_config(validate(assign_ranks(compose(path, *ARGS, *args, *chosen))))
    model = make_model(config, torch.device("cpu"), trains=True)
    optimizer = make_optimizer(config, model)
    peak, events = watched_step(model, lambda: train_step(config, model, optimizer))
    expected, planned, _ = predicted(config, rank, model)
    assert events[: len(planned)] == planned
    assert abs(expected / peak - 1) <= 0.01, (expected, peak)
