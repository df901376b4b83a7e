"""Collectives of ranks that share memory.

The unsharded parameters are in shared memory once: to gather them, each rank writes its shard and
waits for the other ranks. Gradients are copied to an outbox, where their owners read and add them.
All other tensors, and gradients that do not fit into the outbox, are sent over gloo.

Note: why the memory has no name. A file of `memfd_create` exists as long as a process maps it, so
nothing is left when ranks are killed. It does not need /dev/shm, which is small in containers. The
other ranks open it through /proc, which only allows processes of the same user.

Note: why the kernel increments a counter. `FUTEX_WAKE_OP` adds to the counter and wakes its waiters
in one call. It also orders the writes before it on every architecture: a rank that sees the new
count can read the values.
"""

import ctypes
import mmap
import os
import platform
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from fsdpctl.comm.collectives import AllGatherInput, Handle, Reduction
from fsdpctl.comm.flight_recorder import UNRECORDED
from fsdpctl.comm.gloo import GlooCollectives, LocalReduction
from fsdpctl.errors import EngineError
from fsdpctl.plan.layout import Span
from fsdpctl.plan.step_plan import Transport

_GATHERED, _SENT, _READ, _ARRIVED = range(4)  # counters of each rank
_NUM_COUNTERS = 4


@dataclass(frozen=True, slots=True)
class _Message:
    """The gradients of a reduction in an outbox; each rank uses the same offset."""

    number: int
    start: int  # bytes
    stop: int


class SharedCollectives(GlooCollectives):
    """The collectives of the ranks of one machine."""

    transport = Transport.SHARED

    def __init__(self) -> None:
        """Share memory with all ranks, or raise NotShared on all of them. Collective."""
        super().__init__()
        timeout = self.group._get_backend(torch.device("cpu")).options._timeout
        self.memory = SharedMemory(self.all_gather_values, self.rank, timeout.total_seconds())
        self._outboxes: list[Tensor] = []
        self._num_gathered = self._num_sent = self._num_arrived = 0
        self._unread_messages: deque[_Message] = deque()  # this rank has not read them yet
        self._read_messages: list[_Message] = []  # other ranks may not have read them yet

    def use_separate_reduce_group(self) -> None:
        """Do nothing: over shared memory, reductions do not wait for gathers."""

    def wait_for_readers(self) -> None:
        self._num_arrived += 1
        self.memory.raise_counter(_ARRIVED)
        self._memory_waiter(_ARRIVED, self._num_arrived, "the call that writes parameters")()

    def allocate_shared(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return zeros of each size in bytes, or raise EngineError on all ranks. Collective."""
        try:
            return self.memory.allocate(sizes)
        except NotShared as error:
            problem = f"{error}; set launch.share_memory=false"
            raise EngineError(f"memory that ranks share: {problem}") from None

    def reserve_outbox(self, nbytes: int) -> int:
        """Provide an outbox for gradients of `nbytes`. Collective."""
        if not self._outboxes or 2 * nbytes > len(self._outboxes[0]):
            # Twice the size, because free space may be split in two. Untouched pages cost nothing.
            self._outboxes = self.allocate_shared([2 * nbytes] * self.size)
        return nbytes

    def all_gather(self, buffers: Sequence[AllGatherInput]) -> Handle:
        """Write this rank's shard; use gloo if the result is not in shared memory."""
        if not all(self.memory.contains(each.full) for each in buffers):
            return super().all_gather(buffers)
        for each in buffers:
            if each.shard is not None:
                self._own_part(each).copy_(each.shard)
        self.memory.raise_counter(_GATHERED)
        self._num_gathered += 1
        wait = self._memory_waiter(_GATHERED, self._num_gathered, "parameters")
        return Handle.after(wait, buffers[0].full)

    def reduce_scatter(self, full: Tensor, spans: Sequence[Span]) -> Reduction:
        """Copy the spans of other ranks to this rank's outbox; use gloo if they do not fit."""
        message = self._reserve_message(full.nbytes)
        if message is None:
            return super().reduce_scatter(full, spans)
        # Offsets are multiples of each itemsize: flat buffers have multiples of ALIGNMENT elements.
        outboxes = [each[message.start : message.stop].view(full.dtype) for each in self._outboxes]
        for owner, span in enumerate(spans):
            if owner != self.rank:
                outboxes[self.rank][span.start : span.stop].copy_(full[span.start : span.stop])
        self.memory.raise_counter(_SENT)
        shard = slice(spans[self.rank].start, spans[self.rank].stop)
        rows = [each[shard] for each in outboxes]
        rows[self.rank] = full[shard]
        wait = self._memory_waiter(_SENT, message.number, "gradients")
        return LocalReduction(rows, 0, wait_for_rows=wait, on_read=self._mark_read)

    def _reserve_message(self, nbytes: int) -> _Message | None:
        """Return a message at the first free offset, once all ranks have read its old contents.

        None if no offset is free. All ranks compute the same offset, since they send and read the
        same messages in the same order.
        """
        start = 0
        for each in sorted(self._unread_messages, key=lambda each: each.start):
            if start + nbytes <= each.start:
                break
            start = max(start, each.stop)
        if not self._outboxes or start + nbytes > len(self._outboxes[0]):
            return None
        overlaps = [e for e in self._read_messages if e.start < start + nbytes and start < e.stop]
        if overlaps:
            last = max(each.number for each in overlaps)
            self._memory_waiter(_READ, last, "reading gradients")()
            self._read_messages = [each for each in self._read_messages if each.number > last]
        self._num_sent += 1
        self._unread_messages.append(_Message(self._num_sent, start, start + nbytes))
        return self._unread_messages[-1]

    def _mark_read(self) -> None:
        # Reductions are finished in the order of their start.
        self._read_messages.append(self._unread_messages.popleft())
        self.memory.raise_counter(_READ)

    def _memory_waiter(self, kind: int, count: int, target: str) -> Callable[[], None]:
        return partial(self.waits.measure, partial(self.memory.wait, kind, count, target))


_PAGE = 4096
_LINE = 64  # bytes between counters, so that ranks do not write to one cache line
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE_OP = 0, 5  # operations of the system call `futex`
_ADD_ONE = 1 << 28 | 1 << 12  # FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0)
_CHECK_SECONDS = 0.5  # seconds after which a waiting rank checks whether the other ranks live
_EVERYONE = 2**31 - 1
_libc = ctypes.CDLL(None, use_errno=True)

GatherTexts = Callable[[list[str]], list[list[str]]]  # all-gather of texts, in rank order


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class NotShared(Exception):  # noqa: N818  # not an error: gloo is used instead
    """The ranks cannot share memory; the message says why."""


class SharedMemory:
    """The shared memory of a group of ranks on one machine."""

    def __init__(self, exchange: GatherTexts, rank: int, timeout: float) -> None:
        """Map the counters of all ranks, or raise NotShared on all of them. Collective."""
        self.rank, self._exchange, self._timeout = rank, exchange, timeout
        ranks = exchange([_host_key(), str(os.getpid())])
        if not ranks[0][0]:
            raise NotShared(f"not supported on {sys.platform} {platform.machine()}")
        if len({host_key for host_key, _ in ranks}) > 1:
            raise NotShared("the ranks run on several machines or in several containers")
        self._pids = [int(pid) for _, pid in ranks]
        # Addresses of the mappings, which tensors keep alive.
        self._ranges: list[tuple[weakref.ref[mmap.mmap], range]] = []
        self._process_poll = select.poll()
        self._watch()
        (self._storage,) = self.allocate([len(ranks) * _NUM_COUNTERS * _LINE])
        self._counters = self._storage.view(torch.int32)[:: _LINE // 4].numpy()

    def _watch(self) -> None:
        error = ""
        try:
            for pid in self._pids:
                process = os.pidfd_open(pid)  # becomes readable when the process ends
                self._process_poll.register(process, select.POLLIN)
                weakref.finalize(self, os.close, process)
        except OSError as caught:
            error = str(caught)
        for (each,) in self._exchange([error]):
            if each:
                raise NotShared(each)

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return zeros of each size in bytes, or raise NotShared on all ranks. Collective."""
        starts = list(accumulate((-(-size // _PAGE) * _PAGE for size in sizes), initial=0))
        total = max(starts[-1], _PAGE)
        own_fd, error = -1, ""
        if self.rank == 0:
            try:
                own_fd = os.memfd_create("fsdpctl")
                os.fchmod(own_fd, 0o600)
                os.ftruncate(own_fd, total)
            except OSError as caught:
                error = str(caught)
        first_fd, first_error = self._exchange([str(own_fd), error])[0]
        file = own_fd
        try:
            if not first_error:
                if self.rank:
                    file = os.open(f"/proc/{self._pids[0]}/fd/{first_fd}", os.O_RDWR)
                mapping = mmap.mmap(file, total)
        except (OSError, ValueError) as caught:
            error = str(caught)
        # Also a barrier: the file of rank 0 stays open until all ranks have opened it.
        errors = [each for (each,) in self._exchange([error]) if each]
        if file >= 0:
            os.close(file)
        if errors:
            raise NotShared(f"{errors[0]} ({total:,} bytes)")
        begin = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._ranges.append((weakref.ref(mapping), range(begin, begin + total)))
        return [  # each tensor has its own storage
            torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
            if size
            else torch.empty(0, dtype=torch.uint8)
            for size, start in zip(sizes, starts[:-1], strict=True)
        ]

    def contains(self, values: Tensor) -> bool:
        """Return whether `values` is in memory that `allocate` returned."""
        return any(mapped() and values.data_ptr() in each for mapped, each in self._ranges)

    def raise_counter(self, kind: int) -> None:
        """Add 1 to a counter of this rank; ranks that see the new count also see earlier writes."""
        UNRECORDED.count += 1
        address = self._address(self.rank, kind)
        number = ctypes.c_long(_SYS_FUTEX or 0)
        # Wakes all waiters of the first address, none of the second, and adds 1 to the second.
        if _libc.syscall(number, address, _WAKE_OP, _EVERYONE, None, address, _ADD_ONE) < 0:
            raise EngineError(f"shared memory: futex: {os.strerror(ctypes.get_errno())}")

    def wait(self, kind: int, count: int, target: str) -> None:
        """Wait until a counter of every rank has reached `count`.

        EngineError if a rank has exited, or after the timeout of the process group.
        """
        UNRECORDED.pending = f"{target} over shared memory"
        began = time.monotonic()
        for rank in range(len(self._pids)):
            index = rank * _NUM_COUNTERS + kind
            while _is_before(value := int(self._counters[index]), count):
                self._sleep(self._address(rank, kind), value)
                if time.monotonic() - began > _CHECK_SECONDS:
                    self._check(rank, target, time.monotonic() - began)
        UNRECORDED.pending = ""

    def _address(self, rank: int, kind: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._storage.data_ptr() + (rank * _NUM_COUNTERS + kind) * _LINE)

    def _sleep(self, address: ctypes.c_void_p, value: int) -> None:
        """Wait until a counter differs from `value`, at most for `_CHECK_SECONDS`."""
        timeout = ctypes.byref(_Timespec(seconds=0, nanoseconds=int(_CHECK_SECONDS * 1e9)))
        _libc.syscall(ctypes.c_long(_SYS_FUTEX or 0), address, _WAIT, value, timeout, None, 0)

    def _check(self, rank: int, target: str, waited: float) -> None:
        """Raise EngineError if a rank has ended, or after the timeout."""
        target = f"{target} of rank {rank}"
        if waited > self._timeout:
            raise EngineError(f"timed out after {waited:.0f} s: waiting for {target}")
        if self._process_poll.poll(0):
            raise EngineError(f"a rank has ended while this rank waited for {target}")


def _is_before(value: int, count: int) -> bool:
    # Counters are int32 and wrap around; their differences do not.
    return (value - count) & 0x80000000 != 0


def _host_key() -> str:
    """Return a key that is equal on ranks that can share memory, or "" if this rank cannot."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except (AttributeError, OSError):
        return ""  # not Linux, or older than 5.3
    return "" if _SYS_FUTEX is None else f"{boot} {namespace} {os.geteuid()}"
