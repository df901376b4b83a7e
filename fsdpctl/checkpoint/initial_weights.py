"""The weights that a run starts from, and base weights, which its checkpoints do not contain.

Base weights are not trained. A checkpoint names their path and two checksums, which detect another
model of the same shapes. A run verifies the checksum of samples of each tensor when it starts. The
checksum of all bytes takes as long as loading the base, so a run computes it while it trains.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch
import xxhash
from torch import nn

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
from fsdpctl.checkpoint.resized_embeddings import with_resized_embeddings
from fsdpctl.checkpoint.staging import tensor_bytes
from fsdpctl.checkpoint.tensor_file import ITEMSIZES
from fsdpctl.checkpoint.tensor_source import Overlay, TensorSource
from fsdpctl.comm.rank_status import READING, STATUS_PAGE
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.models.adapter_names import is_adapter_name
from fsdpctl.models.build_model import initialize_parameter
from fsdpctl.plan.layout import Span

T = TypeVar("T")
OnBytes = Callable[[int], None]
_CHECKSUMMED_BYTES = 1 << 26  # per checksum
_SAMPLES, _SAMPLE_BYTES = 4, 1 << 18  # per tensor


def report_reading(count: int) -> None:
    """Report that this rank reads weights, so that the watchdog does not take it for hung."""
    STATUS_PAGE.at(READING)


class InitialAdapters:
    """Adapters that are initialized when they are read, from their name and a seed."""

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


def initial_weights(
    model: ModelConfig, module: nn.Module, seed: int, base: TensorSource | None = None
) -> TensorSource:
    """Return the weights that training starts from: `base`, with adapters if it has none.

    By default, `base` has the weights in `model.path`. Only names and shapes of `module` are used.
    `seed` sets the adapters' values. UsageError if `base` and `model.lora.path` both have adapters.
    """
    base = open_weights(model) if base is None else base
    if model.lora.rank is None:
        return base
    if any(map(is_adapter_name, base.names(PARAMETER))):
        if model.lora.path is not None:
            raise UsageError(f"model.lora.path={model.lora.path}: {base} already has adapters")
        return base
    if model.lora.path is None:
        trained = trained_shapes(module)
        shapes = {name: shape for name, shape in trained.items() if is_adapter_name(name)}
        return Overlay(InitialAdapters(shapes, model, seed), base)
    adapters = PeftAdapters(Path(model.lora.path), module)
    adapters.check()
    return Overlay(adapters, base)


class HasAllGather(Protocol):
    """The collective that saving and checksums need."""

    rank: int
    size: int

    def all_gather_values(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Untrained weights that a run reads, which are verified before it saves."""

    record: BaseInfo  # expected checksums; `xxh3` is empty if no checkpoint records it yet
    weights: TensorSource
    checkpoint: str = ""  # the checkpoint that was trained on them; empty if this run is the first
    is_recorded: bool = True  # whether checkpoints of this run record them

    @classmethod
    def new(cls, folder: Path, weights: TensorSource, collectives: HasAllGather) -> Self:
        """Describe weights that no checkpoint names, before they are loaded. Collective."""
        sampled = weights_checksum(weights, _samples, collectives)
        return cls(BaseInfo(str(folder), xxh3="", sampled=sampled), weights)

    def check_samples(self, collectives: HasAllGather, on_bytes: OnBytes = report_reading) -> None:
        """Verify samples of each tensor; CheckpointError if they differ. Collective."""
        if weights_checksum(self.weights, _samples, collectives, on_bytes) != self.record.sampled:
            raise self._changed()

    def verify(self, collectives: HasAllGather, on_bytes: OnBytes = report_reading) -> BaseInfo:
        """Verify all bytes and return the checksums; CheckpointError if they differ. Collective.

        Samples are read last, since they detect weights that were replaced after they were loaded.
        """
        xxh3 = weights_checksum(self.weights, _chunk_spans, collectives, on_bytes)
        self.check_samples(collectives, on_bytes)
        if self.record.xxh3 not in ("", xxh3):
            raise self._changed()
        return BaseInfo(self.record.path, xxh3, self.record.sampled)

    def _changed(self) -> CheckpointError:
        prefix, users = "", "the run has loaded"
        if self.checkpoint:
            prefix, users = f"{self.checkpoint}: ", "the checkpoint was trained on"
        text = f"base model {self.record.path} has changed: expected the weights that {users}"
        return CheckpointError(f"{prefix}{text}")


def open_pretrained(
    model: ModelConfig, folder: Path, collectives: HasAllGather
) -> tuple[TensorSource, BaseWeights | None]:
    """Return the weights of a directory or checkpoint, and a checkpoint's base. Collective."""
    if is_foreign_model(folder):
        return open_weights(model, folder), None
    weights, base = open_with_base(CheckpointReader(folder), collectives)
    return with_resized_embeddings(weights, model), base


def open_with_base(
    reader: CheckpointReader, collectives: HasAllGather
) -> tuple[TensorSource, BaseWeights | None]:
    """Return all weights of a checkpoint, and its base, whose samples are checked. Collective."""
    info = reader.manifest.base
    if info is None:
        return reader, None
    base = BaseWeights(info, open_base(info, reader), str(reader))
    base.check_samples(collectives)
    return Overlay(reader, base.weights), base


def weights_checksum(
    weights: TensorSource,
    spans: Callable[[TensorInfo], Iterable[Span]],
    collectives: HasAllGather,
    on_bytes: OnBytes = report_reading,
) -> str:
    """Return a checksum over `spans` of each tensor; each rank reads some spans. Collective."""
    infos = {name: weights.info(tensor_key(PARAMETER, name)) for name in weights.names(PARAMETER)}
    pairs = [(name, span) for name, info in infos.items() for span in spans(info)]
    rank, size = collectives.rank, collectives.size
    local_pairs = pairs[rank * len(pairs) // size : (rank + 1) * len(pairs) // size]
    error, local_digests = "", list[str]()
    try:
        local_digests = [_digest(weights, name, span, on_bytes) for name, span in local_pairs]
    except FsdpctlError as caught:  # the other ranks wait for the result
        error = str(caught)
    results = collectives.all_gather_values((local_digests, error))
    if errors := [error for _, error in results if error]:
        raise CheckpointError(errors[0])
    digests = [each for rank_digests, _ in results for each in rank_digests]
    shapes = [[name, info.dtype, info.shape] for name, info in infos.items()]
    return checksum(json.dumps([shapes, digests]).encode())


def _chunk_spans(info: TensorInfo) -> Iterable[Span]:
    return Span(0, info.numel).split(_CHECKSUMMED_BYTES // ITEMSIZES[info.dtype])


def _samples(info: TensorInfo) -> Iterable[Span]:
    """Return 4 spans of 256 KiB, from start to end of the tensor, or all of a small tensor."""
    size = _SAMPLE_BYTES // ITEMSIZES[info.dtype]
    last = info.numel - size
    if info.numel <= _SAMPLES * size:
        return [Span(0, info.numel)]
    return [Span(0, size).shift(i * last // (_SAMPLES - 1)) for i in range(_SAMPLES)]


def _digest(weights: TensorSource, name: str, span: Span, on_bytes: OnBytes) -> str:
    digest = xxhash.xxh3_128()
    for _, data in weights.read(tensor_key(PARAMETER, name), span):
        on_bytes(len(data))
        digest.update(data)
    return digest.hexdigest()
