"""Packed weights, made of those in files while these are read, and back."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fsdpctl.checkpoint.manifest import TensorInfo, parameter_name
from fsdpctl.checkpoint.staging import tensor_bytes
from fsdpctl.checkpoint.tensor_source import TensorSource, read_floats
from fsdpctl.errors import CheckpointError
from fsdpctl.models.quantized import GROUP, QuantFormat, quant_format_of, quantized_shapes
from fsdpctl.plan.layout import Span

_BYTES, _FLOATS = "U8", "F32"
_GROUPS_AT_ONCE = 64  # groups, a million weights
WeightShapes = Mapping[str, tuple[int, ...]]  # of the weights, by the parameter's name


def quantized_like(source: TensorSource, module: nn.Module) -> TensorSource:
    """Return `source` with the weights packed that are packed in `module`."""
    packing = quant_format_of(module)
    if packing is None:
        return source
    return QuantizedTensors(source, quantized_shapes(module), packing)


class QuantizedTensors:
    """A source of which some weights are quantized when they are read, unless they were before."""

    def __init__(self, source: TensorSource, shapes: WeightShapes, packing: QuantFormat) -> None:
        self._source, self._shapes, self._packing = source, shapes, packing

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        return self._source.names(kind)

    def info(self, key: str) -> TensorInfo:
        name, stored = parameter_name(key), self._source.info(key)
        shape = self._shapes.get(name)
        if shape is None or stored.dtype == _BYTES:
            return stored
        if tuple(stored.shape) != shape:
            raise CheckpointError(
                f"{self}: {name} has shape {stored.shape}, the model's is {list(shape)}"
            )
        return TensorInfo([self._packing.num_bytes(stored.numel)], _BYTES)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Yield the elements `span`; of the weights, only groups with bytes in it are read."""
        stored = self._source.info(key)
        if parameter_name(key) not in self._shapes or stored.dtype == _BYTES:
            yield from self._source.read(key, span)
            return
        span = span or Span(0, self._packing.num_bytes(stored.numel))
        for bytes_there, weights in _group_ranges(span, stored.numel, self._packing):
            values = torch.from_numpy(read_floats(self._source, key, weights))
            packed = self._packing.quantize(values)
            wanted = bytes_there.intersect(span)
            assert wanted is not None
            within = wanted.shift(-bytes_there.start)
            yield wanted, tensor_bytes(packed[within.start : within.stop])


class DequantizedTensors(QuantizedTensors):
    """The same source, of which these weights are the float32 numbers that they are in training."""

    def info(self, key: str) -> TensorInfo:
        info, shape = super().info(key), self._shapes.get(parameter_name(key))
        return info if shape is None else TensorInfo(list(shape), _FLOATS)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        if parameter_name(key) not in self._shapes:
            yield from super().read(key, span)
            return
        numel = self.info(key).numel
        span = span or Span(0, numel)
        first, last = span.start // GROUP, -(-span.stop // GROUP)
        size = self._packing.group_bytes
        within = Span(first * size, min(last * size, self._packing.num_bytes(numel)))
        for bytes_there, weights in _group_ranges(within, numel, self._packing):
            data = b"".join(bytes(part) for _, part in super().read(key, bytes_there))
            packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            values = self._packing.dequantize(packed, (weights.numel,), torch.float32)
            wanted = weights.intersect(span)
            assert wanted is not None
            part = wanted.shift(-weights.start)
            yield wanted, tensor_bytes(values[part.start : part.stop])


def _group_ranges(span: Span, numel: int, packing: QuantFormat) -> Iterator[tuple[Span, Span]]:
    """Yield the bytes and the weights of the groups that have bytes in `span`, some at a time."""
    size, end = packing.group_bytes, packing.num_bytes(numel)
    last = -(-span.stop // size)
    for first in range(span.start // size, last, _GROUPS_AT_ONCE):
        stop = min(first + _GROUPS_AT_ONCE, last)
        weights = Span(first * GROUP, min(stop * GROUP, numel))
        yield Span(first * size, min(stop * size, end)), weights
