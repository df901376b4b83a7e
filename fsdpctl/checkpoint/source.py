"""What weights can be read from, whoever wrote them."""

from collections.abc import Iterator
from typing import Protocol

from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, TensorInfo, tensor_key
from fsdpctl.plan.layout import Span


class Tensors(Protocol):
    """Whole tensors by key, read by ranges."""

    def names(self, kind: str) -> list[str]:
        """Names of the tensors of one kind, sorted."""
        ...

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a whole tensor; CheckpointError if there is none."""
        ...

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Elements of a flattened tensor, a chunk at a time, each where the last one lay."""
        ...

    def __str__(self) -> str:
        """Where they are."""
        ...


def weight_bytes(source: Tensors) -> int:
    """Bytes of all weights and buffers, as they are stored."""
    return sum(
        source.info(tensor_key(kind, name)).nbytes
        for kind in (PARAMETER, BUFFER)
        for name in source.names(kind)
    )
