"""Tensors whose elements are those of others, one after another or in part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Span


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A range of the flattened elements of a tensor."""

    key: str
    span: Span


@dataclass(frozen=True, slots=True)
class Composition:
    """A tensor made of parts of others."""

    shape: tuple[int, ...]
    parts: tuple[SourceRange, ...]
    kind: str = PARAMETER


class ComposedTensors:
    """A source whose tensors are composed of those of another one, read by range."""

    def __init__(self, source: Tensors, compositions: Mapping[str, Composition]) -> None:
        self._source = source
        self._made = {tensor_key(made.kind, name): made for name, made in compositions.items()}
        self._names = {name: made.kind for name, made in compositions.items()}

    def __str__(self) -> str:
        return str(self._source)

    def names(self, kind: str) -> list[str]:
        return sorted(name for name, of in self._names.items() if of == kind)

    def info(self, key: str) -> TensorInfo:
        if key not in self._made:
            return self._source.info(key)  # raises, and names the tensor
        made = self._made[key]
        dtypes = {self._source.info(part.key).dtype for part in made.parts}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self}: {key}: its parts have dtypes {', '.join(dtypes)}")
        info = TensorInfo(list(made.shape), dtypes.pop())
        if sum(part.span.numel for part in made.parts) != info.numel:
            raise CheckpointError(
                f"{self}: {made.parts[0].key} and {len(made.parts) - 1} more tensors do not fill "
                f"{key} of shape {info.shape}"
            )
        return info

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        made = self._made[key]
        span = span or Span(0, sum(part.span.numel for part in made.parts))
        start = 0
        for part in made.parts:
            here = Span(max(span.start, start), min(span.stop, start + part.span.numel))
            offset = part.span.start - start  # from places here to places there
            start += part.span.numel
            if here.start >= here.stop:
                continue
            for read, data in self._source.read(part.key, here.shift(offset)):
                yield read.shift(-offset), data
