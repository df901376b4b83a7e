"""Weights that are quantized or dequantized while they are read."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fsdpctl.checkpoint.manifest import TensorInfo, parameter_name
from fsdpctl.checkpoint.staging import tensor_bytes
from fsdpctl.checkpoint.tensor_source import TensorSource, read_floats
from fsdpctl.errors import CheckpointError
from fsdpctl.models.quantized import GROUP, QuantFormat, quant_format_of, quantized_shapes
from fsdpctl.plan.layout import Span

_UINT8, _FLOAT32 = "U8", "F32"
_GROUPS_AT_ONCE = 64  # a million weights: the GROUP weights of a group are quantized together
Shapes = Mapping[str, tuple[int, ...]]  # for quantized weights, by parameter name


def quantized_like(source: TensorSource, module: nn.Module) -> TensorSource:
    """Return `source`, in which the weights that are quantized in `module` are quantized too."""
    quant_format = quant_format_of(module)
    if quant_format is None:
        return source
    return QuantizedTensors(source, quantized_shapes(module), quant_format)


class QuantizedTensors:
    """A source that quantizes some weights when they are read, unless they are stored quantized."""

    def __init__(self, source: TensorSource, shapes: Shapes, quant_format: QuantFormat) -> None:
        self._source, self._shapes, self._quant_format = source, shapes, quant_format

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        return self._source.names(kind)

    def info(self, key: str) -> TensorInfo:
        name, stored = parameter_name(key), self._source.info(key)
        shape = self._shapes.get(name)
        if shape is None or stored.dtype == _UINT8:
            return stored
        if tuple(stored.shape) != shape:
            shapes = f"expected shape {list(shape)}, got {stored.shape}"
            raise CheckpointError(f"{self}: {name}: {shapes}")
        return TensorInfo([self._quant_format.num_bytes(stored.numel)], _UINT8)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Yield the elements `span`: of a quantized weight, its bytes."""
        stored = self._source.info(key)
        if parameter_name(key) not in self._shapes or stored.dtype == _UINT8:
            yield from self._source.read(key, span)
            return
        span = span or Span(0, self._quant_format.num_bytes(stored.numel))
        # Read and quantize only groups that overlap `span`.
        for byte_span, weight_span in _spans(span, stored.numel, self._quant_format):
            values = torch.from_numpy(read_floats(self._source, key, weight_span))
            quantized = self._quant_format.quantize(values)
            requested = byte_span.intersect(span)
            assert requested is not None
            local_span = requested.shift(-byte_span.start)
            yield requested, tensor_bytes(quantized[local_span.start : local_span.stop])


class DequantizedTensors(QuantizedTensors):
    """A source in which quantized weights have the float32 values that training computes with."""

    def info(self, key: str) -> TensorInfo:
        info, shape = super().info(key), self._shapes.get(parameter_name(key))
        return info if shape is None else TensorInfo(list(shape), _FLOAT32)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        if parameter_name(key) not in self._shapes:
            yield from super().read(key, span)
            return
        numel = self.info(key).numel
        span = span or Span(0, numel)
        first, stop = span.start // GROUP, -(-span.stop // GROUP)
        size = self._quant_format.group_bytes
        stored_span = Span(first * size, min(stop * size, self._quant_format.num_bytes(numel)))
        for byte_span, weight_span in _spans(stored_span, numel, self._quant_format):
            data = bytearray()
            for _, chunk in super().read(key, byte_span):
                data += chunk  # a copy: the next chunk may reuse its memory
            quantized = torch.frombuffer(data, dtype=torch.uint8)
            values = self._quant_format.dequantize(quantized, (weight_span.numel,), torch.float32)
            requested = weight_span.intersect(span)
            assert requested is not None
            local_span = requested.shift(-weight_span.start)
            yield requested, tensor_bytes(values[local_span.start : local_span.stop])


def _spans(byte_span: Span, numel: int, quant_format: QuantFormat) -> Iterator[tuple[Span, Span]]:
    """Yield spans of bytes and of weights: several groups at a time that overlap `byte_span`."""
    size, num_bytes = quant_format.group_bytes, quant_format.num_bytes(numel)
    end_group = -(-byte_span.stop // size)
    for first in range(byte_span.start // size, end_group, _GROUPS_AT_ONCE):
        stop = min(first + _GROUPS_AT_ONCE, end_group)
        weights = Span(first * GROUP, min(stop * GROUP, numel))
        yield Span(first * size, min(stop * size, num_bytes)), weights
