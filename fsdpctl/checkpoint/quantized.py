"""Weights in NF4, made of those in files while these are read, and back."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.manifest import TensorInfo, parameter_name
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensors import tensor_bytes, tensor_of
from fsdpctl.errors import CheckpointError
from fsdpctl.models.nf4 import (
    GROUP,
    GROUP_BYTES,
    dequantize,
    packed_bytes,
    quantize,
    quantized_shapes,
)
from fsdpctl.plan.layout import Span

_BYTES, _FLOATS = "U8", "F32"
_AT_ONCE = 64  # groups, a million weights
Shapes = Mapping[str, tuple[int, int]]  # of the weights, by the parameter's name


def quantized_as(source: Tensors, module: nn.Module) -> Tensors:
    """Return `source` with the weights in NF4 that `module` has in NF4."""
    shapes = quantized_shapes(module)
    return QuantizedTensors(source, shapes) if shapes else source


class QuantizedTensors:
    """A source of which some weights are quantized when they are read, unless they were before."""

    def __init__(self, source: Tensors, shapes: Shapes) -> None:
        """Quantize the parameters in `shapes`."""
        self._source, self._shapes = source, shapes

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of the tensors of one kind."""
        return self._source.names(kind)

    def info(self, key: str) -> TensorInfo:
        """Return the shape and dtype of a full tensor.

        Raises:
            CheckpointError: If a weight to be quantized has another shape.
        """
        stored, shape = self._source.info(key), self._shapes.get(parameter_name(key))
        if shape is None or stored.dtype == _BYTES:
            return stored
        if tuple(stored.shape) != shape:
            raise CheckpointError(
                f"{self}: {parameter_name(key)} has shape {stored.shape}, the model's is "
                f"{list(shape)}"
            )
        return TensorInfo([packed_bytes(stored.numel)], _BYTES)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Yield the elements `span` of a flattened tensor in chunks.

        Of the weights, only the groups are read whose bytes are in `span`.
        """
        stored = self._source.info(key)
        if parameter_name(key) not in self._shapes or stored.dtype == _BYTES:
            yield from self._source.read(key, span)
            return
        span = span or Span(0, packed_bytes(stored.numel))
        for bytes_there, weights in _groups_of(span, stored.numel):
            packed = quantize(_read(self._source, key, weights))
            wanted = bytes_there.intersect(span)
            assert wanted is not None
            within = wanted.shift(-bytes_there.start)
            yield wanted, tensor_bytes(packed[within.start : within.stop])


class DequantizedTensors:
    """A source of weights in NF4 as the float32 numbers that they are in training."""

    def __init__(self, source: Tensors, shapes: Shapes) -> None:
        """Dequantize the parameters in `shapes`."""
        self._source, self._shapes = QuantizedTensors(source, shapes), shapes

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of the tensors of one kind."""
        return self._source.names(kind)

    def info(self, key: str) -> TensorInfo:
        """Return the shape and dtype of a full tensor."""
        info, shape = self._source.info(key), self._shapes.get(parameter_name(key))
        return info if shape is None else TensorInfo(list(shape), _FLOATS)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Yield the elements `span` of a flattened tensor in chunks."""
        if parameter_name(key) not in self._shapes:
            yield from self._source.read(key, span)
            return
        numel = self.info(key).numel
        span = span or Span(0, numel)
        first, last = span.start // GROUP, -(-span.stop // GROUP)
        within = Span(first * GROUP_BYTES, min(last * GROUP_BYTES, packed_bytes(numel)))
        for bytes_there, weights in _groups_of(within, numel):
            data = b"".join(bytes(part) for _, part in self._source.read(key, bytes_there))
            packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            values = dequantize(packed, (weights.numel,), torch.float32)
            wanted = weights.intersect(span)
            assert wanted is not None
            part = wanted.shift(-weights.start)
            yield wanted, tensor_bytes(values[part.start : part.stop])


def _groups_of(span: Span, numel: int) -> Iterator[tuple[Span, Span]]:
    """Yield the bytes and the weights of the groups that have bytes in `span`, some at a time."""
    last = -(-span.stop // GROUP_BYTES)
    for first in range(span.start // GROUP_BYTES, last, _AT_ONCE):
        stop = min(first + _AT_ONCE, last)
        weights = Span(first * GROUP, min(stop * GROUP, numel))
        yield Span(first * GROUP_BYTES, min(stop * GROUP_BYTES, packed_bytes(numel))), weights


def _read(source: Tensors, key: str, span: Span) -> Tensor:
    """Return weights in float32."""
    values, dtype = torch.empty(span.numel), source.info(key).dtype
    for part, data in source.read(key, span):
        within = part.shift(-span.start)
        values[within.start : within.stop] = tensor_of(data, dtype)
    return values
