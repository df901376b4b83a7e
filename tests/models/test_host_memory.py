"""A rank that loads weights holds its shard in memory, not the whole model."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdpctl.checkpoint.consolidate import write_sharded_weights
from fsdpctl.checkpoint.gguf_export import write_gguf
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import to_settings
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model
from tests.distributed import distributed

BLOCKS, WIDTH = 24, 512
MIB = 1 << 20


def peak_bytes() -> int:
    """Return the peak of resident bytes since the last reset."""
    result = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert result
    return 1024 * int(result[1])


@distributed(world_size=4)
def check_peak(rank: int, world_size: int, path: Path, size: int) -> None:
    config = stored_config(compose_config(["model=hf", f"model.path={path}"]).config)
    load_weights(open_weights(config.model), make_model(config, torch.device("cpu"), empty=True))
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: the first load has imported all
    before = peak_bytes()
    model = make_model(config, torch.device("cpu"), empty=True)
    load_weights(open_weights(config.model), model)
    held = peak_bytes() - before
    block = size // BLOCKS
    assert held <= size // world_size + 3 * block + 8 * MIB, (held // MIB, size // MIB)


def save_large_model(folder: Path) -> int:
    """Save a model; return the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=BLOCKS,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    size: int = sum(param.nbytes for param in model.parameters())
    assert size > 300 * MIB
    return size


@pytest.mark.slow
def test_loading_takes_a_ranks_part_and_a_few_blocks(tmp_path):
    size = save_large_model(tmp_path / "hf")
    check_peak(path=tmp_path / "hf", size=size)
    model = compose_config(["model=hf", f"model.path={tmp_path / 'hf'}"]).config
    options = CheckpointMetadata(config=to_settings(model))
    write_sharded_weights(open_weights(model.model), tmp_path / "c", num_files=1, metadata=options)
    reader = CheckpointReader(tmp_path / "c")
    write_gguf(reader, tmp_path / "m.gguf", dtype="BF16", overwrite=False)
    check_peak(path=tmp_path / "m.gguf", size=size)
