"""The model of CUDA's caching allocator, on sequences whose outcome follows from its rules."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpctl.predict.allocator import CachingAllocator, DeviceFullError

MIB = 1 << 20


def test_small_requests_share_a_segment_and_are_rounded():
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, 100)
    assert (allocator.allocated, allocator.reserved) == (3 * 512, 2 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [(MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12), (50 * MIB + 1, 52)],
)
def test_segments_depend_on_the_request(nbytes, reserved):
    allocator = CachingAllocator()
    allocator.allocate(0, nbytes)
    assert allocator.reserved == reserved * MIB


def after(requests: str, **options: Any) -> CachingAllocator:
    """Return an allocator after requests: 40 allocates 40 MiB with the next key, -1 frees key 1."""
    allocator, key = CachingAllocator(**options), count()
    for request in requests.split():
        if request.startswith("-"):
            allocator.free(int(request[1:]))
        else:
            allocator.allocate(next(key), int(request) * MIB)
    return allocator


def test_the_smallest_block_that_is_large_enough_is_taken():
    assert after("64 32 128 -0 -1 -2 30 128 64").reserved == 224 * MIB


def test_a_remainder_of_up_to_a_mebibyte_stays_with_its_block():
    allocator = after("12 -0 11")
    assert allocator.allocated == 12 * MIB
    allocator.free(1)
    allocator.allocate(2, 11 * MIB - 512)
    assert allocator.allocated == 11 * MIB - 512


def test_free_neighbors_join():
    assert after("60 -0 20 20 20 -1 -3 -2 60").reserved == 60 * MIB


def test_a_larger_request_cannot_use_a_hole_but_an_expandable_segment_grows():
    for expandable, reserved in ((False, 160), (True, 140)):
        assert after("40 40 -1 80 20", expandable=expandable).peak_reserved == reserved * MIB


def test_streams_do_not_share_memory():
    assert after("40 -0 40", streams={1: 1}).reserved == 80 * MIB


def test_the_cache_of_a_full_device_is_emptied_once():
    allocator = after("60 -0 80", capacity=100 * MIB)
    assert (allocator.num_alloc_retries, allocator.reserved) == (1, 80 * MIB)
    with pytest.raises(DeviceFullError):
        allocator.allocate(2, 30 * MIB)


def test_an_expandable_segment_cannot_grow_beyond_the_device():
    allocator = after("40 -0", expandable=True, capacity=100 * MIB)
    with pytest.raises(DeviceFullError):
        allocator.allocate(1, 120 * MIB)
    allocator.allocate(2, 90 * MIB)
    assert allocator.reserved == 100 * MIB


def test_only_whole_pages_of_a_segment_are_returned():
    allocator = after("10 20 10 -1", expandable=True)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB


# A key, bytes, and a stream.
REQUEST = st.tuples(st.integers(0, 9), st.integers(1, 40 * MIB), st.integers(0, 1))


@given(st.lists(REQUEST, max_size=60), st.booleans(), st.sampled_from([None, 120 * MIB]))
def test_counts_are_consistent_after_any_sequence(sequence, expandable, capacity):
    streams = {key: stream for key, _, stream in sequence}
    allocator = CachingAllocator(expandable=expandable, capacity=capacity, streams=streams)
    live: dict[int, int] = {}
    for key, nbytes, _ in sequence:
        if key in live:
            allocator.free(key)
            del live[key]
        else:
            try:
                allocator.allocate(key, nbytes)
            except DeviceFullError:
                assert capacity is not None
                assert allocator.reserved + nbytes > capacity - 20 * MIB
                continue
            live[key] = nbytes
        assert capacity is None or allocator.reserved <= capacity
        assert sum(live.values()) <= allocator.allocated <= allocator.reserved
        assert allocator.allocated <= sum(live.values()) + len(live) * (MIB + 512)
    for key in live:
        allocator.free(key)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved < 20 * MIB * 4 if expandable else allocator.reserved == 0
