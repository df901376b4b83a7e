"""Weights of a model whose embeddings differ from those in its files: with new rows, or untied."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, parameter_name, tensor_key
from fsdpctl.checkpoint.source import Tensors, read_floats
from fsdpctl.checkpoint.tensor_file import cast
from fsdpctl.config.decoder_config import config_dict, with_config, with_sizes
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.model_path import model_settings
from fsdpctl.models.describe import vocabulary_shapes
from fsdpctl.models.registry import build_plain
from fsdpctl.plan.layout import Span

TIED = "tie_word_embeddings"
_ROWS = 1 << 10


def is_fitted(model: ModelConfig) -> bool:
    return model.first_new_token is not None or TIED in json.loads(model.overrides or "{}")


def as_stored(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return the model with the vocabulary and the ties of the directory or file."""
    if not is_fitted(model):
        return model
    words, content = model_settings(str(folder)), config_dict(model)
    content.pop(TIED, None)
    theirs = json.loads(words["model.config_json"])
    content |= {TIED: theirs[TIED]} if TIED in theirs else {}
    stored = with_config(model, content)
    return with_sizes(stored, vocab_size=int(words["model.vocab_size"]))


def fitted(weights: Tensors, model: ModelConfig) -> Tensors:
    return FittedTensors(weights, model) if is_fitted(model) else weights


class FittedTensors:
    """The weights of a source with rows for new tokens, which are the mean of the rows before.

    The head of a model that `model.overrides` unties is the embedding.
    """

    def __init__(self, source: Tensors, model: ModelConfig) -> None:
        self._source = source
        self._shapes, (embedding, *_) = vocabulary_shapes(build_plain(model))
        left = {x for x in self._shapes if x.endswith(".weight")} - {*source.names(PARAMETER)}
        self._others = {} if embedding in left else dict.fromkeys(left, embedding)
        self._first = model.first_new_token
        self._rows: dict[str, bytearray] = {}

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        found = self._source.names(kind)
        return sorted({*found, *self._others}) if kind == PARAMETER else found

    def info(self, key: str) -> TensorInfo:
        info = self._source.info(self._stored(key))
        shape = self._shapes.get(parameter_name(key))
        if self._first is None or shape is None or shape[1:] != tuple(info.shape[1:]):
            return info  # loading compares it with the model's
        return TensorInfo([max(shape[0], info.shape[0]), *shape[1:]], info.dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        info, stored = self.info(key), self._stored(key)
        span = span or Span(0, info.numel)
        if self._first is None or parameter_name(key) not in self._shapes:
            yield from self._source.read(stored, span)
            return
        width = prod(info.shape[1:])
        old = min(self._first, self._source.info(stored).shape[0]) * width
        if span.start < old:
            yield from self._source.read(stored, Span(span.start, min(span.stop, old)))
        if (start := max(span.start, old)) < span.stop:
            first, size = start // width, info.nbytes // info.numel
            rows = self._mean(stored, old, width) * (-(-span.stop // width) - first)
            part = Span(start, span.stop).shift(-first * width)
            yield Span(start, span.stop), memoryview(rows)[part.start * size : part.stop * size]

    def _stored(self, key: str) -> str:
        name = parameter_name(key)
        return tensor_key(PARAMETER, self._others[name]) if name in self._others else key

    def _mean(self, key: str, numel: int, width: int) -> bytearray:
        """Return a row that is the mean of the first rows, computed in float64 and rounded."""
        if key not in self._rows:
            dtype, total = self._source.info(key).dtype, np.zeros(width)
            # Blocks of rows, so that the sum is the same whatever the chunks are that files have.
            for rows in Span(0, numel).split(_ROWS * width):
                values = read_floats(self._source, key, rows).reshape(-1, width)
                total += values.sum(axis=0, dtype=np.float64)
            mean = (total / (numel // width)).astype(np.float32)
            self._rows[key] = bytearray(cast(mean.view(np.uint8).data, "F32", dtype, key))
        return self._rows[key]
