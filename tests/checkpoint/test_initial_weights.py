"""Initial weights that no file stores, and detection of a base that has changed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdpctl.checkpoint.initial_weights import BaseWeights, InitialAdapters
from fsdpctl.checkpoint.manifest import PARAMETER, tensor_key
from fsdpctl.checkpoint.staging import tensor_bytes, tensor_from_bytes
from fsdpctl.checkpoint.tensor_file import TensorEntry, TensorFile, join_remainder, open_tensor_file
from fsdpctl.checkpoint.tensor_source import FileTensors, weight_bytes
from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.mesh import ObjectExchange
from fsdpctl.comm.quantized_states import split_24_bits
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import CheckpointError
from fsdpctl.models.build_model import initialize_parameter
from fsdpctl.plan.layout import Span
from tests.distributed import distributed

MIB = 1 << 20
SMALL, LARGE = MIB // 4, MIB  # float32 elements: sampled in full, and a quarter of them


@pytest.mark.parametrize("span", [None, Span(5, 23)])
def test_adapters_are_drawn_by_their_names_and_the_seed(span):
    model = compose_config(["model=llama_tiny", "model.lora.rank=4"]).config.model
    names = [f"blocks.0.attention.q_proj.lora_{side}.weight" for side in "AB"]
    source = InitialAdapters(dict.fromkeys(names, (4, 8)), model, 7)
    for name in names:
        wanted = torch.full((4, 8), float("nan"))
        initialize_parameter(name, wanted, seed=7, config=model)
        ((at, values),) = source.read(tensor_key(PARAMETER, name), span)
        part = span or Span(0, 32)
        assert at == part
        assert tensor_from_bytes(values, "F32").equal(wanted.view(-1)[part.start : part.stop])


def test_a_master_is_joined_from_its_half_and_its_remainder():
    weights = torch.tensor([1.0, -1.0, 3.1415927, -2.7182817, 1e-20, 0.0])
    half, remainder = torch.empty(6, dtype=torch.bfloat16), torch.empty(6, dtype=torch.int8)
    split_24_bits(weights.clone(), half, remainder)
    whole = tensor_from_bytes(join_remainder(tensor_bytes(half), tensor_bytes(remainder)), "F32")
    assert ((whole - weights).abs() <= weights.abs() * 2.0**-16).all()


def stored(folder: Path, name: str = "one", at: int | None = None, files: int = 1) -> FileTensors:
    """Write and open three tensors; if `at` is set, tensor `name` has another value there."""
    torch.manual_seed(0)
    drawn = {"small": torch.randn(SMALL), "large": torch.randn(8, LARGE // 8), "one": torch.ones(1)}
    if at is not None:
        drawn[name].view(-1)[at] += 1
    results: dict[str, tuple[TensorFile, TensorEntry]] = {}
    for number in range(files):
        path = folder / f"{number}.safetensors"
        save_file(dict([*drawn.items()][number::files]), path)
        file = open_tensor_file(path)
        results |= {key: (file, entry) for key, entry in file.entries.items()}
    return FileTensors(folder, results)


@distributed(world_size=2)
def test_ranks_compute_the_checksums_of_one_and_fail_together(rank, world_size, tmp_path):
    folder = tmp_path / str(rank)
    folder.mkdir()
    weights, ranks, alone = stored(folder), ObjectExchange(), Collectives()
    counts: list[int] = []
    base = BaseWeights.new(Path("base"), weights, ranks)
    info = base.verify(ranks, counts.append)
    assert info == BaseWeights.new(Path("base"), weights, alone).verify(alone)
    samples = 2 * MIB + 4  # at most 1 MiB of each tensor
    assert sum(ranks.all_gather_values(sum(counts))) == weight_bytes(weights) + samples
    if rank == 0:
        (folder / "0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"0/0.safetensors"):
        base.verify(ranks)


@pytest.mark.parametrize(("name", "at", "at_start"), [
    ("one", 0, True), ("small", SMALL - 1, True), ("small", 70_001, True), ("large", 0, True),
    ("large", LARGE - 1, True), ("large", 65_535, True), ("large", 65_536, False),
    ("large", LARGE // 2, False),
])  # fmt: skip
def test_a_changed_base_is_found(tmp_path: Path, name: str, at: int, *, at_start: bool) -> None:
    alone = Collectives()
    new = BaseWeights.new(tmp_path, stored(tmp_path), alone)
    known = BaseWeights(new.verify(alone), stored(tmp_path, files=2))
    known.verify(alone)  # other files are no change
    later, changed = (
        replace(known, weights=stored(tmp_path, name, at)),
        "has changed: expected the weights",
    )
    if at_start:
        with pytest.raises(CheckpointError, match=changed):
            later.check_samples(alone)
        with pytest.raises(CheckpointError, match="expected the weights that the run has loaded"):
            new.verify(alone)
    else:
        later.check_samples(alone)
    with pytest.raises(CheckpointError, match=changed):
        later.verify(alone)
