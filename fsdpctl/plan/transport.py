"""How gradients travel over a backend, and what that needs beside the buffers it is given."""

from collections.abc import Sequence
from enum import StrEnum

from fsdpctl.plan.layout import FlatLayout, Span, are_even

MAX_DIRECT_RANKS = 8  # above, gloo's own algorithms scale better than everybody to everybody
ADDED_AT_A_TIME = 1 << 17  # elements, which are then scaled while they are in the cache
ALL_REDUCED_TOGETHER = 25 << 20  # bytes at least, as in a bucket of DDP
_SENT_TOGETHER = 1 << 17  # elements at most


class Transport(StrEnum):
    """Who moves the bytes."""

    GLOO = "gloo"
    NCCL = "nccl"


def sends_in_place(transport: Transport, parts: Sequence[Span]) -> bool:
    """Whether ranks send each other gradients from where autograd made them, and add themselves.

    Many ranks leave the addition to gloo, which needs all in one buffer and even parts.
    """
    is_direct = len(parts) <= MAX_DIRECT_RANKS or not are_even(parts)
    return transport is Transport.GLOO and len(parts) > 1 and is_direct


def adds_whole(transport: Transport, size: int) -> bool:
    """Whether whole gradients that every rank keeps are added by the backend's all-reduce.

    Two ranks add alike in any order. Among more gloo adds in the order of a ring, so that the parts
    are added as everywhere else, in rank order, and then put together.
    """
    return transport is Transport.NCCL or size == 2


def exchanges(transport: Transport, wire: int, reduce: int) -> bool:
    """Whether ranks send each other one flat buffer and add themselves.

    NCCL adds in the dtype that it sends; one with fewer bytes is added by the owner of each part.
    """
    return transport is Transport.NCCL and wire < reduce


def reduce_workspace(transport: Transport, parts: Sequence[Span], rank: int) -> int:
    """Elements that a reduce-scatter over `parts` allocates on `rank`; NCCL works in place."""
    own, size = parts[rank].numel, len(parts)
    if sends_in_place(transport, parts):
        return own * (size - 1)
    return own if transport is Transport.GLOO and size > 1 else 0


def gradient_stretches(layout: FlatLayout) -> tuple[tuple[Span, tuple[int, ...]], ...]:
    """What is sent as one tensor: a span of the flat buffer, and the parameters in it.

    A large gradient is sent alone, from where it is; small ones next to each other are copied
    together first, with the padding between them, while they are in the cache. The copy never has
    more than half of the buffer, so that together with all gradients it takes no more than what two
    ranks send each other.
    """
    most = min(_SENT_TOGETHER, layout.numel // 2)
    stretches: list[tuple[Span, tuple[int, ...]]] = []
    for index, placement in enumerate(layout.placements):
        span = placement.span
        if stretches and span.stop - stretches[-1][0].start <= most:
            before, indices = stretches.pop()
            stretches.append((Span(before.start, span.stop), (*indices, index)))
        else:
            stretches.append((span, (index,)))
    return tuple(stretches)
