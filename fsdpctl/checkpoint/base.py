"""The weights that a run starts from, and those that its checkpoints leave to their base.

A base is not trained. A checkpoint names it by path, and by two checksums, which detect a different
model of the same shape: a start computes the one of samples of each tensor, and a run the one of
all bytes while it trains, before it saves. The whole of a large base takes as long as loading it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

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
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.plan.layout import Span

T = TypeVar("T")
OnBytes = Callable[[int], None]
_CHUNK_BYTES = 1 << 26  # per checksum
_SAMPLES, _SAMPLE_BYTES = 4, 1 << 18  # of a tensor


def at_reading(count: int) -> None:
    """Report that the training thread reads."""
    RANK_STATUS.at(READING)


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

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""


@dataclass(frozen=True, slots=True)
class Base:
    """Weights that a run reads, to be verified before it saves."""

    info: BaseInfo  # as it must be; `xxh3` is empty if no checkpoint has named them
    weights: Tensors
    source: str = ""  # the checkpoint that names them; empty: the run itself
    is_named: bool = True  # by the checkpoints of the run

    @classmethod
    def new(cls, folder: Path, weights: Tensors, ranks: Ranks) -> Self:
        """Describe weights that no checkpoint has named, before they are loaded. Collective."""
        return cls(BaseInfo(str(folder), "", checksum_of(weights, _samples, ranks)), weights)

    def check(self, ranks: Ranks, on_bytes: OnBytes = at_reading) -> None:
        """Compare the samples of each tensor; CheckpointError if they differ. Collective."""
        if checksum_of(self.weights, _samples, ranks, on_bytes) != self.info.sampled:
            raise self._changed()

    def verified(self, ranks: Ranks, on_bytes: OnBytes = at_reading) -> BaseInfo:
        """Return the description, after all bytes; CheckpointError if they differ. Collective.

        The samples come last: they detect weights that were replaced after they were loaded.
        """
        xxh3 = checksum_of(self.weights, _chunks, ranks, on_bytes)
        self.check(ranks, on_bytes)
        if self.info.xxh3 not in ("", xxh3):
            raise self._changed()
        return BaseInfo(self.info.path, xxh3, self.info.sampled)

    def _changed(self) -> CheckpointError:
        since = "the checkpoint was trained on" if self.source else "the run has loaded"
        return CheckpointError(
            f"{self.source and f'{self.source}: '}base model {self.info.path} has changed: "
            f"its weights differ from those that {since}"
        )


def pretrained_weights(
    model: ModelConfig, folder: Path, ranks: Ranks
) -> tuple[Tensors, Base | None]:
    """Return the weights of a Hugging Face directory or a checkpoint, and its base. Collective."""
    if is_hugging_face(folder):
        return open_weights(model, folder), None
    weights, base = checked_weights(CheckpointReader(folder), ranks)
    return fitted(weights, model), base


def checked_weights(reader: CheckpointReader, ranks: Ranks) -> tuple[Tensors, Base | None]:
    """Return all weights of a checkpoint, and its base, of which samples match. Collective."""
    info = reader.manifest.base
    if info is None:
        return reader, None
    base = Base(info, open_base(info, reader), str(reader))
    base.check(ranks)
    return Overlay(reader, base.weights), base


def checksum_of(
    weights: Tensors,
    spans: Callable[[TensorInfo], Iterable[Span]],
    ranks: Ranks,
    on_bytes: OnBytes = at_reading,
) -> str:
    """Return a checksum over `spans` of each tensor, which `ranks` read in parts. Collective."""
    infos = {name: weights.info(tensor_key(PARAMETER, name)) for name in weights.names(PARAMETER)}
    parts = [(name, span) for name, info in infos.items() for span in spans(info)]
    start, stop = (place * len(parts) // ranks.size for place in (ranks.rank, ranks.rank + 1))
    error, own = "", list[str]()
    try:
        own = [_digest(weights, name, span, on_bytes) for name, span in parts[start:stop]]
    except FsdpctlError as caught:  # the other ranks wait for the result
        error = str(caught)
    results = ranks.all_gather_object((own, error))
    for _, error in results:
        if error:
            raise CheckpointError(error)
    digests = [each for of_rank, _ in results for each in of_rank]
    shapes = [[name, info.dtype, info.shape] for name, info in infos.items()]
    return checksum(json.dumps([shapes, digests]).encode())


def _chunks(info: TensorInfo) -> Iterable[Span]:
    return Span(0, info.numel).split(_CHUNK_BYTES // ITEMSIZES[info.dtype])


def _samples(info: TensorInfo) -> Iterable[Span]:
    """Return 1 MiB at four places, of which the last ends the tensor; all of a smaller one."""
    size = _SAMPLE_BYTES // ITEMSIZES[info.dtype]
    last = info.numel - size
    if info.numel <= _SAMPLES * size:
        return [Span(0, info.numel)]
    return [Span(0, size).shift(place * last // (_SAMPLES - 1)) for place in range(_SAMPLES)]


def _digest(weights: Tensors, name: str, span: Span, on_bytes: OnBytes) -> str:
    found = xxhash.xxh3_128()
    for _, data in weights.read(tensor_key(PARAMETER, name), span):
        on_bytes(len(data))
        found.update(data)
    return found.hexdigest()
