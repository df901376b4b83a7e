"""The weights that a checkpoint leaves out because they are not trained: its base.

A checkpoint names it by its path and by a checksum over everything in it, so that another model of
the same shape is noticed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from fsdpctl.checkpoint.manifest import PARAMETER, BaseInfo, TensorInfo, tensor_key
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.spans import checksum
from fsdpctl.checkpoint.tensor_file import ITEMSIZES
from fsdpctl.comm.rank_status import RANK_STATUS, READING
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Span

T = TypeVar("T")
_CHUNK_BYTES = 1 << 26  # of one checksum


class Ranks(Protocol):
    """What finding a checksum needs of the ranks."""

    rank: int
    size: int

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        ...


class Overlay:
    """The tensors of one source, and those of another that the first does not have."""

    def __init__(self, upper: Tensors, lower: Tensors) -> None:
        self.upper, self.lower = upper, lower
        self._in_upper = frozenset(upper.names(PARAMETER))

    def __str__(self) -> str:
        return str(self.upper)

    def names(self, kind: str) -> list[str]:
        """Of both."""
        return sorted({*self.upper.names(kind), *self.lower.names(kind)})

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a whole tensor."""
        return self._source(key).info(key)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """The elements `span` of a flattened tensor, a chunk at a time."""
        return self._source(key).read(key, span)

    def _source(self, key: str) -> Tensors:
        name = key.removeprefix(tensor_key(PARAMETER, ""))
        return self.upper if name in self._in_upper else self.lower


def base_info(folder: Path, weights: Tensors, ranks: Ranks) -> BaseInfo:
    """What names `weights`, which lie in `folder`. Collective: every rank reads a share of them.

    The checksum is the same for any number of ranks.
    """
    infos = {name: weights.info(tensor_key(PARAMETER, name)) for name in weights.names(PARAMETER)}
    chunks = [(name, span) for name, info in infos.items() for span in _chunks(info)]
    start, stop = (place * len(chunks) // ranks.size for place in (ranks.rank, ranks.rank + 1))
    own = [_digest(weights, name, span) for name, span in chunks[start:stop]]
    digests = [each for of_rank in ranks.gather_objects(own) for each in of_rank]
    shapes = [[name, info.dtype, info.shape] for name, info in infos.items()]
    return BaseInfo(str(folder), checksum(json.dumps([shapes, digests]).encode()))


def check_base(known: BaseInfo, weights: Tensors, ranks: Ranks, where: str) -> None:
    """See that `weights` are those that a checkpoint names. Collective.

    Raises:
        CheckpointError: which begins with `where`; they are others.
    """
    if base_info(Path(known.path), weights, ranks).xxh3 != known.xxh3:
        raise CheckpointError(
            f"{where}: its base {known.path} is not what it was: the weights there are others"
        )


def _chunks(info: TensorInfo) -> Iterator[Span]:
    size = _CHUNK_BYTES // ITEMSIZES[info.dtype]
    for start in range(0, info.numel, size):
        yield Span(start, min(start + size, info.numel))


def _digest(weights: Tensors, name: str, span: Span) -> str:
    found = xxhash.xxh3_128()
    for _, data in weights.read(tensor_key(PARAMETER, name), span):
        RANK_STATUS.at(READING)
        found.update(data)
    return found.hexdigest()
