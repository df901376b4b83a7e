"""Collectives of ranks that share memory.

Parameters are gathered where every rank reads them: each rank writes its part, and waits for the
others. Gradients are copied to where their owner reads and adds them. Everything else, and what
does not fit, is sent over gloo.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fsdpctl.comm.base import Gathering, Handle, Reduction
from fsdpctl.comm.gloo import GlooCollectives, LocalReduction
from fsdpctl.comm.shared_memory import NotShared, SharedMemory
from fsdpctl.errors import EngineError
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step import Transport

_GATHERED, _SENT, _READ, _MET = range(4)  # counters


@dataclass(frozen=True, slots=True)
class _Message:
    """The gradients of a reduction in a rank's outbox, at the same place in all of them."""

    number: int
    start: int  # bytes
    stop: int


class SharedCollectives(GlooCollectives):
    """Collectives of the ranks of one machine."""

    transport = Transport.SHARED

    def __init__(self) -> None:
        """Share memory with all ranks. Collective.

        Raises:
            NotShared: On every rank, if they cannot.
        """
        super().__init__()
        timeout = self.gather_group._get_backend(torch.device("cpu")).options._timeout
        self.memory = SharedMemory(self.gather_objects, self.rank, timeout.total_seconds())
        self._outboxes: list[Tensor] = []
        self._num_gathered = self._num_sent = self._num_met = 0
        self._unread: deque[_Message] = deque()  # by this rank
        self._read: list[_Message] = []  # by this rank, maybe not by others

    def separate_reductions(self) -> None:
        """Do nothing: reductions do not pass gathers in a process group."""

    def meet(self) -> None:
        """Return once every rank has arrived, and none reads parameters."""
        self._num_met += 1
        self.memory.raise_counter(_MET)
        self._wait_for(_MET, self._num_met, "the call that writes parameters")()

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return shared bytes of zeros of each size. Collective.

        Raises:
            EngineError: On every rank, if the system does not provide them.
        """
        try:
            return self.memory.allocate(sizes)
        except NotShared as error:
            raise EngineError(
                f"memory that ranks share: {error}; set launch.share_memory=false"
            ) from None

    def reserve(self, nbytes: int) -> int:
        """Provide an outbox for gradients of `nbytes`. Collective."""
        if not self._outboxes or 2 * nbytes > len(self._outboxes[0]):
            # Twice, for a message that does not fit between others; what is not used is not taken.
            self._outboxes = self.allocate([2 * nbytes] * self.size)
        return nbytes

    def all_gather(self, buffers: Sequence[Gathering]) -> Handle:
        """Write this rank's part; over gloo, if the result is not in shared memory."""
        if not all(self.memory.contains(each.whole) for each in buffers):
            return super().all_gather(buffers)
        for each in buffers:
            if each.shard is not None:
                self._own(each).copy_(each.shard)
        self.memory.raise_counter(_GATHERED)
        self._num_gathered += 1
        wait = self._wait_for(_GATHERED, self._num_gathered, "parameters")

        def finish() -> Tensor:
            wait()
            return buffers[0].whole

        return Handle(finish)

    def reduce_scatter(self, whole: Tensor, parts: Sequence[Span]) -> Reduction:
        """Copy what others own to this rank's outbox; over gloo, if there is no room."""
        message = self._place(whole.nbytes)
        if message is None:
            return super().reduce_scatter(whole, parts)
        boxes = [each[message.start : message.stop].view(whole.dtype) for each in self._outboxes]
        for owner, part in enumerate(parts):
            if owner != self.rank:
                boxes[self.rank][part.start : part.stop].copy_(whole[part.start : part.stop])
        self.memory.raise_counter(_SENT)
        own = parts[self.rank]
        rows = [each[own.start : own.stop] for each in boxes]
        rows[self.rank] = whole[own.start : own.stop]
        wait = self._wait_for(_SENT, message.number, "gradients")
        return LocalReduction(rows, 0, wait, self._has_read)

    def _place(self, nbytes: int) -> _Message | None:
        """Return the first place that fits, once all ranks have read what was there."""
        start = 0
        for each in sorted(self._unread, key=lambda each: each.start):
            if start + nbytes <= each.start:
                break
            start = max(start, each.stop)
        if not self._outboxes or start + nbytes > len(self._outboxes[0]):
            return None
        overlaps = [e for e in self._read if e.start < start + nbytes and start < e.stop]
        if overlaps:
            last = max(each.number for each in overlaps)
            self._wait_for(_READ, last, "reading gradients")()
            self._read = [each for each in self._read if each.number > last]
        self._num_sent += 1
        self._unread.append(_Message(self._num_sent, start, start + nbytes))
        return self._unread[-1]

    def _has_read(self) -> None:
        """Declare that this rank has read the oldest message of all ranks."""
        self._read.append(self._unread.popleft())
        self.memory.raise_counter(_READ)

    def _wait_for(self, kind: int, count: int, what: str) -> Callable[[], None]:
        return partial(self.waits.around, partial(self.memory.wait, kind, count, what))
