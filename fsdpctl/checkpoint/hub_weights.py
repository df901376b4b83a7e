"""Weights of models of transformers, renamed between names in memory and names in Hub files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from transformers.core_model_loading import build_glob_alternation

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.tensor_source import TensorSource
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import CheckpointError
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.hub_names import map_stored_tensors, stored_names
from fsdpctl.models.transformers_build import build_causal_lm
from fsdpctl.plan.layout import Span


@dataclass(frozen=True, slots=True)
class _Composition:
    """A tensor that is the concatenation of ranges of other tensors."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, Span], ...]  # ranges of flattened tensors
    kind: str = PARAMETER


class ComposedTensors:
    """A source whose tensors are composed of ranges of another source's tensors."""

    def __init__(self, source: TensorSource, compositions: Mapping[str, _Composition]) -> None:
        self._source = source
        self._compositions = {tensor_key(x.kind, name): x for name, x in compositions.items()}
        self._kinds = {name: each.kind for name, each in compositions.items()}

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        return sorted(name for name, each in self._kinds.items() if each == kind)

    def info(self, key: str) -> TensorInfo:
        if key not in self._compositions:
            return self._source.info(key)  # raises: a missing tensor
        composition = self._compositions[key]
        dtypes = {self._source.info(part).dtype for part, _ in composition.parts}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self}: {key}: the parts have dtypes {', '.join(dtypes)}")
        info = TensorInfo(list(composition.shape), dtypes.pop())
        if sum(span.numel for _, span in composition.parts) != info.numel:
            raise CheckpointError(
                f"{self}: {composition.parts[0][0]} and {len(composition.parts) - 1} more tensors "
                f"do not fill {key} of shape {info.shape}"
            )
        return info

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        composition = self._compositions[key]
        span = span or Span(0, sum(part.numel for _, part in composition.parts))
        start = 0
        for inner, part in composition.parts:
            overlap = Span(max(span.start, start), min(span.stop, start + part.numel))
            offset = part.start - start  # from positions in this tensor to positions in the part
            start += part.numel
            if overlap.start >= overlap.stop:
                continue
            for read, data in self._source.read(inner, overlap.shift(offset)):
                yield read.shift(-offset), data


def under_model_names(stored: TensorSource, model: ModelConfig) -> TensorSource:
    """Return the weights of a Hugging Face directory under their names in memory."""
    module = build_base_model(model)
    compositions = {}
    for name, storage in map_stored_tensors(module, stored.names(PARAMETER)).items():
        keys = [tensor_key(PARAMETER, each) for each in storage.parts]
        parts = tuple((key, Span(0, stored.info(key).numel)) for key in keys)
        for copy in storage.copies:
            _check_equal(stored, storage.parts[0], copy)
        shape = storage.shape or (sum(span.numel for _, span in parts),)
        kind = BUFFER if storage.is_buffer else PARAMETER
        if len(parts) == 1:
            shape = tuple(stored.info(keys[0]).shape)  # loading checks it
        compositions[name] = _Composition(shape, parts, kind)
    return ComposedTensors(stored, compositions)


def under_hub_names(weights: TensorSource, model: ModelConfig) -> TensorSource:
    """Return weights under the names and in the shapes that transformers writes to files."""
    module = build_base_model(model)
    shapes = stored_names(module)
    compositions = {}
    for name, storage in map_stored_tensors(module, list(shapes)).items():
        key = tensor_key(BUFFER if storage.is_buffer else PARAMETER, name)
        sizes = [prod(shapes[part]) for part in storage.parts]
        for part, size, stop in zip(storage.parts, sizes, accumulate(sizes), strict=True):
            compositions[part] = _Composition(shapes[part], ((key, Span(stop - size, stop)),))
    return ComposedTensors(weights, compositions)


def float32_names(model: ModelConfig) -> frozenset[str]:
    """Return the names in files of tensors that transformers keeps in float32 in 16-bit models."""
    with torch.device("meta"):
        half = build_causal_lm(model, torch.bfloat16)
    # float16 has the plan of all 16-bit dtypes; $^ matches nothing, if the plan is empty.
    listed = build_glob_alternation([*half._get_dtype_plan(torch.float16), "$^"])[0]
    float32 = {name for name, each in half.state_dict().items() if each.dtype == torch.float32}
    module = build_base_model(model)
    storage = map_stored_tensors(module, list(stored_names(module)))
    in_float32 = (x for name, x in storage.items() if name in float32 or listed.search(name))
    return frozenset(part for each in in_float32 for part in each.parts)


def _check_equal(weights: TensorSource, name: str, copy: str) -> None:
    """Check that two stored tensors, which the model ties, are equal."""
    keys = [tensor_key(PARAMETER, each) for each in (name, copy)]
    shapes = [weights.info(key).shape for key in keys]
    chunks = zip(*(weights.read(key) for key in keys), strict=True)
    if shapes[0] != shapes[1] or any(a != b for (_, a), (_, b) in chunks):
        raise CheckpointError(f"{weights}: {copy} differs from {name}, but config.json ties them")
