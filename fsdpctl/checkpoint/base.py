"""The weights that a run starts from, and those that its checkpoints leave to their base.

A base is not trained. A checkpoint names it by path, and by a checksum over all of its weights,
which detects a different model of the same shape.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import xxhash
from torch import nn

from fsdpctl.checkpoint.fitted import fitted
from fsdpctl.checkpoint.manifest import (
    PARAMETER,
    BaseInfo,
    TensorInfo,
    checksum,
    parameter_name,
    tensor_key,
)
from fsdpctl.checkpoint.peft import PeftAdapters, trained_shapes
from fsdpctl.checkpoint.pretrained import open_base, open_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Overlay, Tensors
from fsdpctl.checkpoint.tensor_file import ITEMSIZES
from fsdpctl.checkpoint.tensors import tensor_bytes
from fsdpctl.comm.rank_status import RANK_STATUS, READING
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.model_path import is_hugging_face
from fsdpctl.config.peft import is_adapter
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.plan.layout import Span

T = TypeVar("T")
_CHUNK_BYTES = 1 << 26  # per checksum


class InitialAdapters:
    """Adapters that are initialized when they are read, each by its name and the seed."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, seed: int
    ) -> None:
        self._shapes, self._model, self._seed = shapes, model, seed

    def __str__(self) -> str:
        return "adapters"

    def names(self, kind: str) -> list[str]:
        return sorted(self._shapes) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        return TensorInfo(list(self._shapes[parameter_name(key)]), "F32")

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        info = self.info(key)
        span = span or Span(0, info.numel)
        full = torch.empty(info.shape)
        initialize_parameter(parameter_name(key), full, seed=self._seed, config=self._model)
        yield span, tensor_bytes(full.view(-1)[span.start : span.stop])


def first_weights(model: ModelConfig, module: nn.Module, seed: int, base: Tensors) -> Tensors:
    """Return the weights that training starts from: `base`, plus adapters if it has none.

    Of `module`, only names and shapes are used. `seed` is that of the adapters' initial values.
    """
    if model.lora.rank is None:
        return base
    if any(map(is_adapter, base.names(PARAMETER))):
        if model.lora.path is not None:
            raise UsageError(f"model.lora.path={model.lora.path}: {base} already has adapters")
        return base
    if model.lora.path is None:
        trained = trained_shapes(module)
        shapes = {name: shape for name, shape in trained.items() if is_adapter(name)}
        return Overlay(InitialAdapters(shapes, model, seed), base)
    given = PeftAdapters(Path(model.lora.path), module)
    given.check()
    return Overlay(given, base)


def weights_in_model_path(model: ModelConfig, module: nn.Module, seed: int) -> Tensors:
    return first_weights(model, module, seed, open_weights(model))


class Ranks(Protocol):
    """The collectives that saving and checksums need."""

    rank: int
    size: int

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""


def base_info(folder: Path, weights: Tensors, ranks: Ranks) -> BaseInfo:
    """Describe the base `weights`, equally for any number of ranks, which share it. Collective."""
    infos = {name: weights.info(tensor_key(PARAMETER, name)) for name in weights.names(PARAMETER)}
    sizes = {name: _CHUNK_BYTES // ITEMSIZES[info.dtype] for name, info in infos.items()}
    chunks = [(x, span) for x, info in infos.items() for span in Span(0, info.numel).cut(sizes[x])]
    start, stop = (place * len(chunks) // ranks.size for place in (ranks.rank, ranks.rank + 1))
    own = [_digest(weights, name, span) for name, span in chunks[start:stop]]
    digests = [each for of_rank in ranks.gather_objects(own) for each in of_rank]
    shapes = [[name, info.dtype, info.shape] for name, info in infos.items()]
    return BaseInfo(str(folder), checksum(json.dumps([shapes, digests]).encode()))


def pretrained_weights(model: ModelConfig, folder: Path, ranks: Ranks) -> Tensors:
    """Return the weights of a Hugging Face directory or a checkpoint. Collective."""
    if is_hugging_face(folder):
        return open_weights(model, folder)
    return fitted(checked_weights(CheckpointReader(folder), ranks), model)


def checked_weights(reader: CheckpointReader, ranks: Ranks) -> Tensors:
    """Return all weights of a checkpoint, of which those in its base are verified. Collective."""
    base = reader.manifest.base
    if base is None:
        return reader
    weights = open_base(base, reader)
    if base_info(Path(base.path), weights, ranks).xxh3 != base.xxh3:
        raise CheckpointError(
            f"{reader}: base model {base.path} has changed: its weights differ from those that "
            "the checkpoint was trained on"
        )
    return Overlay(reader, weights)


def _digest(weights: Tensors, name: str, span: Span) -> str:
    found = xxhash.xxh3_128()
    for _, data in weights.read(tensor_key(PARAMETER, name), span):
        RANK_STATUS.at(READING)
        found.update(data)
    return found.hexdigest()
