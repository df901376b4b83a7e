"""The base of a checkpoint: the weights that it leaves out because they are not trained.

A checkpoint names its base by path, and by a checksum over all of its weights, which detects a
different model of the same shape.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from fsdpctl.checkpoint.manifest import PARAMETER, BaseInfo, TensorInfo, checksum, tensor_key
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensor_file import ITEMSIZES
from fsdpctl.comm.rank_status import RANK_STATUS, READING
from fsdpctl.errors import CheckpointError
from fsdpctl.plan.layout import Span

T = TypeVar("T")
_CHUNK_BYTES = 1 << 26  # per checksum


class Ranks(Protocol):
    """The collectives that saving and checksums need."""

    rank: int
    size: int

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""
        ...


def base_info(folder: Path, weights: Tensors, ranks: Ranks) -> BaseInfo:
    """Describe the base `weights` in `folder`. Collective: every rank reads a share of them.

    The checksum does not depend on the number of ranks.
    """
    infos = {name: weights.info(tensor_key(PARAMETER, name)) for name in weights.names(PARAMETER)}
    chunks = [(name, span) for name, info in infos.items() for span in _chunks(info)]
    start, stop = (place * len(chunks) // ranks.size for place in (ranks.rank, ranks.rank + 1))
    own = [_digest(weights, name, span) for name, span in chunks[start:stop]]
    digests = [each for of_rank in ranks.gather_objects(own) for each in of_rank]
    shapes = [[name, info.dtype, info.shape] for name, info in infos.items()]
    return BaseInfo(str(folder), checksum(json.dumps([shapes, digests]).encode()))


def check_base(known: BaseInfo, weights: Tensors, ranks: Ranks, where: str) -> None:
    """Check that `weights` are the base that a checkpoint names. Collective.

    Raises:
        CheckpointError: If they differ; the message begins with `where`.
    """
    if base_info(Path(known.path), weights, ranks).xxh3 != known.xxh3:
        raise CheckpointError(
            f"{where}: base model {known.path} has changed: its weights differ from those that "
            "the checkpoint was trained on"
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
