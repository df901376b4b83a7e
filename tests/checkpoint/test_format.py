"""Checkpoints have the format that docs/checkpoint-format.md describes, and stay small."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from docs.examples.read_checkpoint import read_tensor
from fsdpctl.checkpoint.consolidate import write_sharded_weights
from fsdpctl.checkpoint.manifest import FileInfo, Manifest, TensorInfo
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.staging import TORCH_DTYPES, tensor_bytes, tensor_from_bytes
from fsdpctl.checkpoint.tensor_file import (
    TensorEntry,
    cast,
    make_header,
    open_tensor_file,
    rank_file,
    write_tensor_file,
)
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import to_settings
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.models.build_model import build_model
from fsdpctl.plan.layout import Span
from tests.checkpoint.test_round_trip import save, saves, trained, whole_tensors


@pytest.mark.slow
def test_a_reader_that_knows_only_the_document_reads_the_same(tmp_path):
    folder = tmp_path / "c"
    saves(world_size=3, folder=folder)
    for key, values in whole_tensors(folder).items():
        assert np.array_equal(read_tensor(folder, key), values.numpy()), key
    file = folder / rank_file(1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    entries = open_tensor_file(file).entries
    last = max(entries, key=lambda key: (entries[key].start, key))
    with pytest.raises(ValueError, match=rf"{last} in rank-00001.safetensors is corrupted"):
        read_tensor(folder, last)


def test_the_manifest_of_405b_on_16384_ranks_is_small():
    config = compose_config(["model=llama3_405b"]).config
    params = dict(build_model(config.model).named_parameters())
    kinds = ("model", "exp_avg", "exp_avg_sq")
    tensors = {
        f"{kind}/{name}": TensorInfo(list(param.shape), "F32")
        for kind in kinds
        for name, param in params.items()
    }
    files = {rank_file(rank): FileInfo(297 << 20, f"{rank:032x}") for rank in range(16384)}
    manifest = Manifest(files, {}, tensors, Progress(), to_settings(config), {}, 16384)
    assert len(params) == 126 * 9 + 3
    assert len(manifest.to_json()) < 10_000_000


class Numbers:
    """A module with one large tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def names(self, kind: str) -> list[str]:
        return ["x"] if kind == "model" else []

    def info(self, key: str) -> TensorInfo:
        return TensorInfo(list(self._values.shape), "F32")

    def read(self, key, span=None):
        data = tensor_bytes(self._values.view(-1)[span.start : span.stop].clone())
        for start in range(0, len(data), 777_776):
            yield span, data[start : start + 777_776]


def test_only_requested_chunks_are_read_and_verified(tmp_path):
    values = torch.arange(1_500_000, dtype=torch.float32).view(1500, 1000)
    folder = tmp_path / "c"
    write_sharded_weights(Numbers(values), folder, num_files=2, metadata=CheckpointMetadata())
    reader = CheckpointReader(folder)
    for span in (Span(0, 10), Span(262_140, 262_150), Span(740_000, 760_000), Span(0, 1_500_000)):
        result = torch.empty(span.numel)
        for part, data in reader.read("model/x", span):
            within = part.shift(-span.start)
            result[within.start : within.stop] = tensor_from_bytes(data, "F32")
        assert torch.equal(result, values.view(-1)[span.start : span.stop])
    file = folder / rank_file(0)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1  # in the last chunk of the first half
    file.write_bytes(content)
    damaged = CheckpointReader(folder)
    assert sum(len(data) for _, data in damaged.read("model/x", Span(0, 500_000))) == 2_000_000
    with pytest.raises(CheckpointError, match=r"rank-00000.*checksum of model/x"):
        list(damaged.read("model/x", Span(700_000, 750_000)))


@pytest.mark.parametrize("source", ["F64", "F32", "BF16", "F16"])
@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
def test_casts_equal_those_of_torch(source, target):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, dtype=torch.float64, generator=generator) * 100
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 6e-8])
    values = torch.cat([values, special.double(), 1 + torch.arange(99) / 2**9])
    values = values.to(TORCH_DTYPES[source])
    data = cast(tensor_bytes(values), source, target, "x")
    result = tensor_from_bytes(memoryview(bytearray(data)), target)
    expected = values.to(TORCH_DTYPES[target])
    assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(result.isnan(), expected.isnan())


def test_values_out_of_the_range_of_float16_are_rejected():
    values = torch.tensor([1.0, 70000.0])
    with pytest.raises(UsageError, match="x: values out of the range of float16; export them as"):
        cast(tensor_bytes(values), "F32", "F16", "x")


def test_a_manifest_of_a_later_version_is_rejected(tmp_path):
    save(tmp_path / "c", *trained("no_shard"))
    reader = CheckpointReader(tmp_path / "c")
    text = replace(reader.manifest, world_size=9).to_json().replace('"version": 2', '"version": 9')
    (tmp_path / "c" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="version 9 is not supported; expected version 2"):
        CheckpointReader(tmp_path / "c")


def test_attachments_are_verified(tmp_path: Path):
    save(tmp_path / "c", *trained("no_shard"))
    assert CheckpointReader(tmp_path / "c").attachment("tokenizer.json") == b"{}" * 200
    (tmp_path / "c" / "tokenizer.json").write_bytes(b"[]" * 200)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: corrupted"):
        CheckpointReader(tmp_path / "c").attachment("tokenizer.json")
    (tmp_path / "c" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not found"):
        CheckpointReader(tmp_path / "c")


def test_a_written_file_is_checked_by_the_reference_implementation(tmp_path):
    header = make_header([TensorEntry("a", "F32", (2,))], {})
    with pytest.raises(CheckpointError, match="corrupted"):
        write_tensor_file(tmp_path / "x", header, [memoryview(bytes(4))])
    assert write_tensor_file(tmp_path / "y", header, [memoryview(bytes(8))]) == len(header) + 8
