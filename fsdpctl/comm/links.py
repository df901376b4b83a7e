"""The links between ranks: speed in both directions at once, and the difference of clocks."""

import time

import torch
import torch.distributed as dist

_REPEATS, _PINGS = 4, 8


def partner(number: int, count: int) -> int | None:
    """Return the neighbor of a member of `count`; the last of an odd number has none."""
    other = number ^ 1
    return other if other < count else None


def exchange_speed(to: int | None, source: int | None, nbytes: int, device: torch.device) -> float:
    """Return the bytes per second that this rank sends while it receives as much. Collective.

    The best of several times; the first also connects. 0 for a rank without partners.
    """
    sent, received = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    seconds = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        if to is not None and source is not None:
            both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 0.0 if to is None else nbytes / min(seconds)


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
