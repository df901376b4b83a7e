"""The transport of gradients over a backend, and the workspace that it needs."""

from collections.abc import Sequence
from enum import StrEnum

from fsdpctl.plan.layout import Span, are_even

MAX_DIRECT_RANKS = 8  # above, gloo's own algorithms scale better than direct exchange
ADDED_AT_A_TIME = 1 << 17  # elements, scaled while they are in the cache


class Transport(StrEnum):
    """A communication backend."""

    GLOO = "gloo"
    NCCL = "nccl"


def sends_in_place(transport: Transport, parts: Sequence[Span]) -> bool:
    """Return whether ranks send gradients from autograd's memory, and add them themselves.

    Many ranks leave the addition to gloo, which needs one buffer and even parts.
    """
    is_direct = len(parts) <= MAX_DIRECT_RANKS or not are_even(parts)
    return transport is Transport.GLOO and len(parts) > 1 and is_direct


def adds_whole(transport: Transport, size: int) -> bool:
    """Return whether the backend's all-reduce adds unsharded gradients that every rank keeps.

    Two ranks get the same sum in any order. Among more, gloo adds in ring order; the parts are
    instead added in rank order, as everywhere else, and then gathered.
    """
    return transport is Transport.NCCL or size == 2


def exchanges(transport: Transport, wire: int, reduce: int) -> bool:
    """Return whether ranks exchange one flat buffer and add its parts themselves.

    NCCL adds in the dtype that it sends. If that has fewer bytes, the owner of each part adds it.
    """
    return transport is Transport.NCCL and wire < reduce


def reduce_workspace(transport: Transport, parts: Sequence[Span], rank: int) -> int:
    """Return the elements that a reduce-scatter allocates on `rank`; NCCL works in place."""
    own, size = parts[rank].numel, len(parts)
    if sends_in_place(transport, parts):
        return own * (size - 1)
    return own if transport is Transport.GLOO and size > 1 else 0
