"""Adapters added to the weights that they are of."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.cast import FLOATS, cast
from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.pretrained import whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import DOWN, UP, adapted_layers, is_adapter
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import Span

Matrix = NDArray[np.float32]


def exported_weights(reader: CheckpointReader, dtype: str | None, *, merges: bool) -> Tensors:
    """The whole weights of a checkpoint as others read them: without adapters.

    Args:
        reader: of the checkpoint.
        dtype: safetensors' name of what merged weights are rounded to; None: what they were.
        merges: add adapters to the weights that they are of.

    Raises:
        UsageError: there are adapters that are not to be merged, or the other way round.
    """
    weights = whole_weights(reader)
    has_adapters = any(map(is_adapter, weights.names(PARAMETER)))
    if has_adapters and not merges:
        raise UsageError(
            f"{reader}: has adapters: --merge adds them to the weights, and --format peft writes "
            "them alone"
        )
    if merges and not has_adapters:
        raise UsageError(f"--merge: {reader} has no adapters")
    if not merges:
        return weights
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    return MergedWeights(weights, model, dtype)


class MergedWeights:
    """Weights with their adapters added to them: W + scale * B A, in float32, rounded once."""

    def __init__(self, weights: Tensors, model: ModelConfig, dtype: str | None = None) -> None:
        """Merge while they are read.

        Args:
            weights: with adapters.
            model: whose they are.
            dtype: safetensors' name of what merged weights become; None: what they were.
        """
        self._weights = weights
        self._scale = np.float32(model.lora.scale)
        self._is_transposed = model.architecture == "gpt2"
        self._dtype = dtype
        self._last: tuple[str, tuple[Matrix, Matrix]] | None = None
        self._merged = {f"{name}.weight" for name in adapted_layers(weights.names(PARAMETER))}

    def __str__(self) -> str:
        return str(self._weights)

    def names(self, kind: str) -> list[str]:
        """Of all that are no adapters."""
        return [name for name in self._weights.names(kind) if not is_adapter(name)]

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a whole tensor."""
        info = self._weights.info(key)
        if self._dtype is None or info.dtype not in FLOATS or self._name(key) not in self._merged:
            return info
        return TensorInfo(info.shape, self._dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """The elements `span` of a flattened tensor, a chunk at a time."""
        name, info = self._name(key), self.info(key)
        if name not in self._merged:
            yield from self._weights.read(key, span)
            return
        stored, (_, columns) = self._weights.info(key).dtype, info.shape
        layer = name.removesuffix(".weight")
        left, right = self._factors(layer)
        for within, data in self._weights.read(key, span):
            values = np.frombuffer(cast(data, stored, "F32", name), np.float32)
            first, stop = within.start // columns, -(-within.stop // columns)
            added = (left[first:stop] @ right).reshape(-1)
            offset = within.start - first * columns
            values = values + self._scale * added[offset : offset + within.numel]
            yield within, cast(_bytes(values), "F32", info.dtype, name)

    @staticmethod
    def _name(key: str) -> str:
        return key.removeprefix(tensor_key(PARAMETER, ""))

    def _factors(self, layer: str) -> tuple[Matrix, Matrix]:
        """Whose product is added to a layer's weight; those of the last layer stay."""
        if self._last is None or self._last[0] != layer:
            down, up = self._whole(f"{layer}.{DOWN}.weight"), self._whole(f"{layer}.{UP}.weight")
            self._last = (layer, (down.T, up.T) if self._is_transposed else (up, down))
        return self._last[1]

    def _whole(self, name: str) -> Matrix:
        """An adapter's matrix in float32."""
        key = tensor_key(PARAMETER, name)
        info = self._weights.info(key)
        parts = [
            np.frombuffer(cast(data, info.dtype, "F32", name), np.float32).copy()
            for _, data in self._weights.read(key)
        ]
        return np.concatenate(parts).reshape(info.shape)


def _bytes(values: Matrix) -> memoryview:
    flat: NDArray[np.uint8] = np.ascontiguousarray(values).view(np.uint8)
    return flat.data
