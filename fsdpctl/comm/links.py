"""The links between ranks: speed in both directions at once, and the difference of clocks."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_REPEATS, _PINGS = 4, 8


def neighbors(number: int, count: int) -> range:
    """Return the pair of a member of `count`; the last three of an odd number are together."""
    first = number - number % 2
    if count % 2 and number >= count - 3:
        return range(max(0, count - 3), count)
    return range(first, first + 2)


def ring_speed(ring: Sequence[int], nbytes: int, device: torch.device) -> float:
    """Return the bytes per second that this rank sends to the next one of a ring. Collective.

    It receives as much from the one before. Different ranks may be in different rings. The best of
    several times; the first also connects. 0 for a rank that is alone.
    """
    own = ring.index(dist.get_rank())
    to, source = ring[(own + 1) % len(ring)], ring[own - 1]
    sent, received = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    seconds = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        if len(ring) > 1:
            both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds) if len(ring) > 1 else 0.0


def clock_offset(rank: int) -> tuple[float, float]:
    """Return by how many seconds a rank's clock is ahead of rank 0's, and the largest error.

    Only rank 0 and that rank call it, and rank 0 gets the result.
    """
    stamp = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(_PINGS):
        if dist.get_rank() == 0:
            before = time.time()
            dist.send(stamp, rank)
            dist.recv(stamp, rank)
            after = time.time()
            found.append(((after - before) / 2, stamp.item() - (before + after) / 2))
        else:
            dist.recv(stamp, 0)
            dist.send(stamp.fill_(time.time()), 0)
    error, offset = min(found, default=(0.0, 0.0))
    return offset, error
