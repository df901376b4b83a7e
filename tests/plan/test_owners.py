"""Owner maps cover every block once, and the balanced one is balanced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import ALIGNMENT
from fsdpctl.plan.owners import OWNER_MAPS, OwnerMap, make_owner_map

block_sizes = st.lists(st.integers(1, 40).map(lambda n: n * ALIGNMENT), min_size=1, max_size=12)
names = st.sampled_from(OWNER_MAPS)


@given(names, block_sizes, st.integers(1, 9))
def test_every_element_has_exactly_one_owner(name, sizes, world_size):
    owners = make_owner_map(name, sizes, world_size)
    for block, size in enumerate(sizes):
        spans = list(owners.owners(block).values())
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == size
        assert all(span.start % ALIGNMENT == 0 for span in spans)
    assert sum(owners.fraction_of(rank) for rank in range(world_size)) == pytest.approx(1.0)


@given(names, block_sizes, st.integers(1, 9))
def test_the_queries_agree(name, sizes, world_size):
    owners = make_owner_map(name, sizes, world_size)
    for rank in range(world_size):
        assert owners.blocks_of(rank) == [b for b in range(len(sizes)) if owners.owns(rank, b)]
        for block, span in owners.spans_of(rank).items():
            assert owners.owners(block)[rank] == span


@given(names, block_sizes, st.integers(1, 9))
def test_a_map_survives_json(name, sizes, world_size):
    owners = make_owner_map(name, sizes, world_size)
    assert OwnerMap.from_dict(owners.to_dict()) == owners  # type: ignore[arg-type]


@given(block_sizes, st.integers(1, 9))
def test_the_balanced_map_cuts_few_blocks_and_exceeds_the_mean_by_little(sizes, world_size):
    owners = OwnerMap.balanced(sizes, world_size)
    cut = [block for block in range(len(sizes)) if len(owners.owners(block)) > 1]
    assert len(cut) <= world_size - 1
    mean = sum(sizes) / world_size
    for rank in range(world_size):
        owned = sum(span.numel for span in owners.spans_of(rank).values())
        assert owned <= mean + ALIGNMENT


@given(st.sampled_from(["round_robin", "contiguous"]), block_sizes, st.integers(1, 9))
def test_whole_blocks_are_never_cut(name, sizes, world_size):
    owners = make_owner_map(name, sizes, world_size)
    assert all(len(owners.owners(block)) == 1 for block in range(len(sizes)))


def test_round_robin_and_contiguous_are_what_they_are_called():
    spread, packed = OwnerMap.round_robin(5, 2), OwnerMap.contiguous(5, 2)
    assert [spread.blocks_of(rank) for rank in (0, 1)] == [[0, 2, 4], [1, 3]]
    assert [packed.blocks_of(rank) for rank in (0, 1)] == [[0, 1, 2], [3, 4]]
    assert spread.fraction_of(0) == 0.6
    assert OwnerMap.contiguous(2, 4).blocks_of(3) == []


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda m: m.owners(5), "blocks 0 to 4"),
        (lambda m: m.owns(2, 0), "ranks 0 to 1"),
        (lambda m: m.fraction_of(-1), "ranks 0 to 1"),
        (lambda m: OwnerMap.round_robin(0, 2), "0 blocks"),
        (lambda m: make_owner_map("blanced", [64], 1), "did you mean balanced?"),
    ],
)
def test_what_is_out_of_range_is_an_error(call, word):
    with pytest.raises(UsageError) as caught:
        call(OwnerMap.round_robin(5, 2))
    assert word in str(caught.value)
