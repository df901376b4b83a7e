"""What the collectives of a backend need beside the buffers they are given."""

from collections.abc import Sequence
from enum import StrEnum

from fsdpctl.plan.layout import Span, are_even

MAX_DIRECT_RANKS = 8  # above, gloo's own algorithms scale better than everybody to everybody


class Transport(StrEnum):
    """Who moves the bytes."""

    GLOO = "gloo"
    NCCL = "nccl"


def reduce_workspace(transport: Transport, parts: Sequence[Span], rank: int) -> int:
    """Elements that a reduce-scatter over `parts` allocates on `rank`.

    NCCL works in place. Over gloo few ranks receive each other's contributions, and add them
    themselves; many leave the addition to gloo.
    """
    own, size = parts[rank].numel, len(parts)
    if size == 1 or transport is Transport.NCCL:
        return 0
    return own if size > MAX_DIRECT_RANKS and are_even(parts) else own * size
