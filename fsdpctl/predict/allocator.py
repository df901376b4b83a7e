"""A model of CUDA's caching allocator: the memory that it reserves for a sequence of allocations.

The model follows c10/cuda/CUDACachingAllocator.cpp in torch with its default settings. Requests up
to 1 MiB and larger requests have separate pools. A request takes the smallest free block that is
large enough, which is split if enough remains. Segments have 2 MiB, 20 MiB or multiples of 2 MiB.
An expandable segment grows by 2 MiB (small requests) or 20 MiB instead. If the device is out of
memory, the allocator returns all free segments and requests again.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import chain

_MIB = 1 << 20
_MIN_BLOCK_SIZE = 512
_SMALL_SIZE = _MIB  # largest small request
_SMALL_BUFFER, _LARGE_BUFFER = 2 * _MIB, 20 * _MIB
_MIN_LARGE_ALLOC = 10 * _MIB  # smallest request that gets a segment of its size
_SEGMENT_STRIDE = 1 << 50  # between the addresses of two segments


class DeviceFullError(Exception):
    """The device does not have enough memory, even with an empty cache."""


class _Block:
    __slots__ = ("is_free", "next", "prev", "unmapped", "pool", "size", "start")

    def __init__(self, start: int, size: int, pool: "_Pool") -> None:
        self.start, self.size, self.pool = start, size, pool
        self.is_free = True
        self.prev: _Block | None = None  # neighbors in the segment
        self.next: _Block | None = None
        self.unmapped = 0  # bytes in an expandable segment that were returned to the device


class _Pool:
    __slots__ = ("free", "page_size", "last", "min_remainder")

    def __init__(self, page_size: int, min_remainder: int) -> None:
        self.free: list[tuple[int, int, _Block]] = []  # sorted by size, then address
        self.page_size = page_size  # bytes by which an expandable segment grows
        self.min_remainder = min_remainder  # smallest remainder of a block that is split
        self.last: _Block | None = None  # the end of the expandable segment


class CachingAllocator:
    """A simulated allocator of a rank, which counts allocated and reserved bytes."""

    def __init__(
        self,
        *,
        expandable: bool = False,
        capacity: int | None = None,
        streams: Mapping[int, int] | None = None,
    ) -> None:
        """Create an empty allocator, which reserves at most `capacity` bytes.

        `streams` maps keys of allocations to streams; other keys are on stream 0.
        """
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.num_alloc_retries = 0  # how often the cache was emptied because memory ran out
        self._expandable, self._capacity = expandable, capacity
        self._segments = 0
        self._live: dict[int, _Block] = {}
        self._streams = {} if streams is None else streams
        self._pools: dict[int, tuple[_Pool, _Pool]] = {}
        self._small, self._large = self._pools_of(0)

    def allocate(self, key: int, nbytes: int) -> None:
        """Allocate at least `nbytes`, which `free(key)` frees."""
        # 0 bytes take a block, too.
        size = -(-nbytes // _MIN_BLOCK_SIZE) * _MIN_BLOCK_SIZE or _MIN_BLOCK_SIZE
        if key in self._streams:
            pool = self._pools_of(self._streams[key])[size > _SMALL_SIZE]
        else:  # stream 0 without a look-up: this is the inner loop of an estimate
            pool = self._small if size <= _SMALL_SIZE else self._large
        index = bisect_left(pool.free, (size, 0))
        block = self._best_fit(pool, index) if index < len(pool.free) else None
        if block is None:
            block = self._new_block(pool, size)
        elif block.unmapped:
            self._remap(block, size)
        if block.size - size >= pool.min_remainder:
            self._split(pool, block, size)
        block.is_free = False
        self._live[key] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def free(self, key: int) -> None:
        """Free an allocation; its block is merged with free neighbors."""
        block = self._live.pop(key)
        self.allocated -= block.size
        block.is_free = True
        pool, prev, next_block = block.pool, block.prev, block.next
        if prev is not None and prev.is_free:
            self._remove_free(prev)
            block.start, block.size = prev.start, prev.size + block.size
            block.unmapped += prev.unmapped
            block.prev = prev.prev
            if block.prev is not None:
                block.prev.next = block
        if next_block is not None and next_block.is_free:
            self._remove_free(next_block)
            block.size += next_block.size
            block.unmapped += next_block.unmapped
            block.next = next_block.next
            if block.next is not None:
                block.next.prev = block
            if pool.last is next_block:
                pool.last = block
        insort(pool.free, (block.size, block.start, block))

    def allocate_temporary(self, key: int, nbytes: int) -> None:
        """Allocate `nbytes` and free them at once."""
        pool = self._small if nbytes <= _SMALL_SIZE else self._large
        size = -(-nbytes // _MIN_BLOCK_SIZE) * _MIN_BLOCK_SIZE
        # Usually a free block is large enough, and the pool is the same afterwards.
        if pool.free and pool.free[-1][0] >= size and not pool.free[-1][2].unmapped:
            self.peak_allocated = max(self.peak_allocated, self.allocated + size)
            return
        self.allocate(key, nbytes)
        self.free(key)

    def empty_cache(self) -> None:
        """Return free segments, or free pages of expandable segments, to the device."""
        for pool in chain(*self._pools.values()):
            if self._expandable:
                for _, start, block in pool.free:
                    # A page is unmapped only if the block contains all of it.
                    first = -(-start // pool.page_size) * pool.page_size
                    stop = (start + block.size) // pool.page_size * pool.page_size
                    page_bytes = max(0, stop - first)
                    self.reserved -= max(0, page_bytes - block.unmapped)
                    block.unmapped = max(block.unmapped, page_bytes)
                continue
            remaining = []
            for entry in pool.free:
                if entry[2].prev is None and entry[2].next is None:
                    self.reserved -= entry[0]
                else:
                    remaining.append(entry)
            pool.free = remaining

    def _pools_of(self, stream: int) -> tuple[_Pool, _Pool]:
        if stream not in self._pools:
            # torch splits a large block of a fixed segment only if more than 1 MiB remains.
            min_remainder = _MIN_BLOCK_SIZE if self._expandable else _SMALL_SIZE + 1
            large = _Pool(_LARGE_BUFFER, min_remainder)
            self._pools[stream] = _Pool(_SMALL_BUFFER, _MIN_BLOCK_SIZE), large
        return self._pools[stream]

    def _best_fit(self, pool: _Pool, index: int) -> _Block:
        """Take the smallest block from `index` on; the end of an expandable segment comes last."""
        if pool.free[index][2] is pool.last and index + 1 < len(pool.free):
            index += 1
        return pool.free.pop(index)[2]

    def _new_block(self, pool: _Pool, size: int) -> _Block:
        if self._expandable:
            return self._grow(pool, size)
        nbytes = -(-size // _SMALL_BUFFER) * _SMALL_BUFFER
        if _SMALL_SIZE < size < _MIN_LARGE_ALLOC:
            nbytes = _LARGE_BUFFER
        self._reserve(nbytes)
        self._segments += 1
        return _Block(self._segments * _SEGMENT_STRIDE, nbytes, pool)

    def _grow(self, pool: _Pool, size: int) -> _Block:
        last = pool.last
        if last is None or not last.is_free:
            grown = -(-size // pool.page_size) * pool.page_size
            self._reserve(grown)
            start = last.start + last.size if last is not None else 0
            block = _Block(start, grown, pool)
            block.prev = last
            if last is not None:
                last.next = block
        else:
            grown = -(-(size - last.size) // pool.page_size) * pool.page_size
            # `_reserve` may empty the cache, which must not unmap the block that grows.
            self._remove_free(last)
            try:
                self._reserve(grown + last.unmapped)
            except DeviceFullError:
                insort(pool.free, (last.size, last.start, last))
                raise
            last.size += grown
            last.unmapped = 0
            block = last
        pool.last = block
        return block

    def _remap(self, block: _Block, size: int) -> None:
        """Map pages of a free block again; if that fails, the block is free again."""
        needed = min(block.unmapped, -(-size // block.pool.page_size) * block.pool.page_size)
        try:
            self._reserve(needed)
        except DeviceFullError:
            insort(block.pool.free, (block.size, block.start, block))
            raise
        block.unmapped -= needed

    def _reserve(self, nbytes: int) -> None:
        capacity = self._capacity
        if capacity is not None and self.reserved + nbytes > capacity:
            self.num_alloc_retries += 1
            self.empty_cache()
            if self.reserved + nbytes > capacity:
                raise DeviceFullError
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = _Block(block.start + size, block.size - size, pool)
        rest.prev, rest.next = block, block.next
        rest.unmapped, block.unmapped = block.unmapped, 0
        if block.next is not None:
            block.next.prev = rest
        block.next = rest
        block.size = size
        if pool.last is block:
            pool.last = rest
        insort(pool.free, (rest.size, rest.start, rest))

    def _remove_free(self, block: _Block) -> None:
        del block.pool.free[bisect_left(block.pool.free, (block.size, block.start))]
