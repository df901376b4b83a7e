"""What a computation asks of a device, operator by operator."""

from enum import StrEnum
from typing import NamedTuple


class WorkKind(StrEnum):
    """What limits how fast an operator is."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    MEMORY = "memory"  # reading and writing


class Work(NamedTuple):
    """One operator, by its name in torch.

    `dims` are batch, rows, columns and the length of the sums of a matrix product; batch, heads,
    length and width of attention, whose `flops` count what a causal mask leaves.
    """

    name: str
    kind: WorkKind
    flops: int
    nbytes: int  # read and written, each tensor once
    itemsize: int  # bytes of an element that is multiplied
    dims: tuple[int, int, int, int] = (0, 0, 0, 0)
