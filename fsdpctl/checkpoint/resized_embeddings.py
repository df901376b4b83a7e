"""Weights with more embedding rows than their files, or with an output head that the files tie."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, parameter_name, tensor_key
from fsdpctl.checkpoint.tensor_file import cast
from fsdpctl.checkpoint.tensor_source import TensorSource, read_floats
from fsdpctl.config.decoder_config import config_dict, with_config, with_sizes
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.model_path import model_settings
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.module_spec import vocabulary_shapes
from fsdpctl.plan.layout import Span

TIE_KEY = "tie_word_embeddings"
_ROWS_AT_ONCE = 1 << 10


def changes_embeddings(model: ModelConfig) -> bool:
    return model.first_new_token is not None or TIE_KEY in json.loads(model.overrides or "{}")


def stored_config(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return the configuration with the vocabulary size and tying of the directory or file."""
    if not changes_embeddings(model):
        return model
    settings, content = model_settings(str(folder)), config_dict(model)
    content.pop(TIE_KEY, None)
    stored_json = json.loads(settings["model.config_json"])
    content |= {TIE_KEY: stored_json[TIE_KEY]} if TIE_KEY in stored_json else {}
    stored = with_config(model, content)
    return with_sizes(stored, vocab_size=int(settings["model.vocab_size"]))


def with_resized_embeddings(weights: TensorSource, model: ModelConfig) -> TensorSource:
    return ResizedEmbeddings(weights, model) if changes_embeddings(model) else weights


class ResizedEmbeddings:
    """The weights of a source with additional rows for new tokens.

    A new row is the mean of the existing rows. If `model.overrides` unties the output head, the
    head starts as a copy of the embedding.
    """

    def __init__(self, source: TensorSource, model: ModelConfig) -> None:
        self._source = source
        self._shapes, (embedding, *_) = vocabulary_shapes(build_base_model(model))
        missing = {x for x in self._shapes if x.endswith(".weight")} - {*source.names(PARAMETER)}
        self._untied = {} if embedding in missing else dict.fromkeys(missing, embedding)
        self._first_new_token = model.first_new_token
        self._mean_rows: dict[str, bytearray] = {}

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        names = self._source.names(kind)
        return sorted({*names, *self._untied}) if kind == PARAMETER else names

    def info(self, key: str) -> TensorInfo:
        info = self._source.info(self._stored_key(key))
        shape = self._shapes.get(parameter_name(key))
        if self._first_new_token is None or shape is None or shape[1:] != tuple(info.shape[1:]):
            return info  # loading checks the shape
        return TensorInfo([max(shape[0], info.shape[0]), *shape[1:]], info.dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        info, stored = self.info(key), self._stored_key(key)
        span = span or Span(0, info.numel)
        if self._first_new_token is None or parameter_name(key) not in self._shapes:
            yield from self._source.read(stored, span)
            return
        width = prod(info.shape[1:])
        # Stored rows from the first new token on are unused.
        old_numel = min(self._first_new_token, self._source.info(stored).shape[0]) * width
        if span.start < old_numel:
            yield from self._source.read(stored, Span(span.start, min(span.stop, old_numel)))
        if (start := max(span.start, old_numel)) < span.stop:
            first, size = start // width, info.nbytes // info.numel
            rows = self._mean_row(stored, old_numel, width) * (-(-span.stop // width) - first)
            part = Span(start, span.stop).shift(-first * width)
            yield Span(start, span.stop), memoryview(rows)[part.start * size : part.stop * size]

    def _stored_key(self, key: str) -> str:
        name = parameter_name(key)
        return tensor_key(PARAMETER, self._untied[name]) if name in self._untied else key

    def _mean_row(self, key: str, numel: int, width: int) -> bytearray:
        """Return a row that is the mean of the first rows, computed in float64 and rounded."""
        if key not in self._mean_rows:
            dtype, total = self._source.info(key).dtype, np.zeros(width)
            # A fixed block size, so that the sum does not depend on the chunks of files.
            for row_span in Span(0, numel).split(_ROWS_AT_ONCE * width):
                values = read_floats(self._source, key, row_span).reshape(-1, width)
                total += values.sum(axis=0, dtype=np.float64)
            mean = (total / (numel // width)).astype(np.float32)
            self._mean_rows[key] = bytearray(cast(mean.view(np.uint8).data, "F32", dtype, key))
        return self._mean_rows[key]
