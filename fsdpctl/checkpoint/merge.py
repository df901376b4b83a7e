"""Merging adapters into the weights of their layers, while the weights are read."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, parameter_name, tensor_key
from fsdpctl.checkpoint.pretrained import with_base
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import FLOATS, cast
from fsdpctl.checkpoint.tensor_source import TensorSource, expert_factors
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.errors import UsageError
from fsdpctl.models.adapter_names import (
    LORA_A,
    LORA_B,
    adapted_layers,
    adapted_weight,
    is_adapter_name,
)
from fsdpctl.plan.layout import Span

MODEL_KEY = "model"  # the setting that names the model
FloatArray = NDArray[np.float32]


def exported_weights(reader: CheckpointReader, dtype: str | None, *, merge: bool) -> TensorSource:
    """Return the full weights of a checkpoint without adapters, under the names in Hub files.

    `merge` merges adapters. Merged weights get `dtype`; None keeps their stored dtype.
    UsageError if the checkpoint has adapters and `merge` is false, or the reverse.
    """
    weights = with_base(reader)
    has_adapters = any(map(is_adapter_name, weights.names(PARAMETER)))
    if has_adapters and not merge:
        raise UsageError(
            f"{reader}: has adapters; pass --merge to add them to the weights, or --format peft "
            "to export the adapters alone"
        )
    if merge and not has_adapters:
        raise UsageError(f"--merge: {reader} has no adapters")
    if MODEL_KEY not in reader.manifest.config:  # a custom training loop saves no settings
        return weights
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    if merge and model.base_dtype is not None:
        weights = _merge_quantized(weights, model, dtype)
    elif merge:
        weights = MergedTensors(weights, model, dtype, transposed=_transposed(model))
    from fsdpctl.checkpoint.hub_weights import under_hub_names  # imports torch

    return under_hub_names(weights, model)


def _merge_quantized(weights: TensorSource, model: ModelConfig, dtype: str | None) -> TensorSource:
    """Merge adapters into the dequantized weights that they were trained with.

    A `dtype` of None selects the dtype of the base's files, or float32 if they have several.
    """
    from fsdpctl.checkpoint.quantized import DequantizedTensors  # imports torch
    from fsdpctl.models.build_model import build_model
    from fsdpctl.models.quantized import QUANT_FORMATS, quantized_shapes

    quant_format = QUANT_FORMATS[str(model.base_dtype)]
    shapes = quantized_shapes(build_model(model))
    dtypes = {weights.info(tensor_key(PARAMETER, name)).dtype for name in shapes}
    if dtype is None:
        dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= {*FLOATS} else "F32"
    dequantized = DequantizedTensors(weights, shapes, quant_format)
    return MergedTensors(dequantized, model, dtype, rounded=shapes, transposed=_transposed(model))


def _transposed(model: ModelConfig) -> frozenset[str]:
    from fsdpctl.models.build_model import build_base_model
    from fsdpctl.models.linear_layers import transposed_layers  # imports torch

    return transposed_layers(build_base_model(model))


def notes_on_merge(reader: CheckpointReader, *, merge: bool) -> tuple[str, ...]:
    """Return a note if adapters were merged into dequantized weights."""
    dtype = reader.manifest.config.get("model.base_dtype", "auto")
    if not merge or dtype == "auto":
        return ()
    text = f"adapters merged into the {dtype.upper()} weights that they were trained with"
    base = reader.manifest.base
    return (text if base is None else f"{text}; the weights in {base.path} differ",)


class MergedTensors:
    """Weights with merged adapters: W + scale * B A, computed in float32 and rounded once."""

    def __init__(
        self,
        weights: TensorSource,
        model: ModelConfig,
        dtype: str | None = None,
        rounded: Collection[str] = (),
        transposed: Collection[str] = (),
    ) -> None:
        """Wrap `weights`, which are merged when they are read.

        Merged weights and the parameters `rounded` get `dtype`; None keeps their stored dtype. The
        weights of layers `transposed` are (in, out).
        """
        self._weights = weights
        self._scale = np.float32(model.lora.scale)
        self._transposed, self._dtype = transposed, dtype
        # The name of a weight, and its factors by expert.
        self._cached_factors: tuple[str, tuple[FloatArray, FloatArray]] | None = None
        layers = adapted_layers(weights.names(PARAMETER))
        self._layer_of = {adapted_weight(layer): layer for layer in layers}
        self._rounded = {*self._layer_of, *rounded}

    def __str__(self) -> str:
        return str(self._weights)

    def names(self, kind: str) -> list[str]:
        return [name for name in self._weights.names(kind) if not is_adapter_name(name)]

    def info(self, key: str) -> TensorInfo:
        info = self._weights.info(key)
        is_rounded = parameter_name(key) in self._rounded
        if self._dtype is None or info.dtype not in FLOATS or not is_rounded:
            return info
        return TensorInfo(info.shape, self._dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        name, info = parameter_name(key), self.info(key)
        stored = self._weights.info(key).dtype
        if name not in self._layer_of:
            for part, data in self._weights.read(key, span):
                yield part, cast(data, stored, info.dtype, name)
            return
        columns = info.shape[-1]
        for part, data in self._weights.read(key, span):
            values = np.frombuffer(cast(data, stored, "F32", name), np.float32)
            first, stop = part.start // columns, -(-part.stop // columns)
            product = self._product_rows(name, info.shape, first, stop).reshape(-1)
            offset = part.start - first * columns
            values = values + self._scale * product[offset : offset + part.numel]
            yield part, cast(values.view(np.uint8).data, "F32", info.dtype, name)

    def _product_rows(self, name: str, shape: Sequence[int], first: int, stop: int) -> FloatArray:
        """Return rows of the product B A for a weight; rows of experts are concatenated."""
        left, right = self._factors(name, shape[0] if len(shape) == 3 else 1)
        num_rows, products = shape[-2], []
        for expert in range(first // num_rows, -(-stop // num_rows)):
            start = expert * num_rows
            rows = left[expert][max(first - start, 0) : min(stop - start, num_rows)]
            products.append(rows @ right[expert])
        return np.concatenate(products)

    def _factors(self, name: str, num_experts: int) -> tuple[FloatArray, FloatArray]:
        """Return the factors of a product, (experts, …); the last weight's factors are cached."""
        if self._cached_factors is None or self._cached_factors[0] != name:
            layer = self._layer_of[name]
            names = f"{layer}.{LORA_A}.weight", f"{layer}.{LORA_B}.weight"
            lora_a, lora_b = expert_factors(self._weights, *names, num_experts)
            factors = lora_b, lora_a
            if layer in self._transposed:
                factors = lora_a.transpose(0, 2, 1), lora_b.transpose(0, 2, 1)
            self._cached_factors = name, factors
        return self._cached_factors[1]
