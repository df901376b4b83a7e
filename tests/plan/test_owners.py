"""Owner maps cover every block once, and the balanced one is balanced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import ALIGNMENT, round_up
from fsdpctl.plan.owner_map import OWNER_MAPS, OwnerMap, make_owner_map

block_sizes = st.lists(st.integers(1, 40).map(lambda n: n * ALIGNMENT), min_size=1, max_size=12)
names = st.sampled_from(OWNER_MAPS)


@given(names, block_sizes, st.integers(1, 9))
def test_every_element_has_exactly_one_owner(name, sizes, world_size):
    owners = make_owner_map(name, sizes, world_size)
    for block, size in enumerate(sizes):
        spans = list(owners.owners(block).values())
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert (spans[-1].stop, all(span.start % ALIGNMENT == 0 for span in spans)) == (size, True)
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
        assert sum(span.numel for span in owners.spans_of(rank).values()) <= mean + ALIGNMENT


@given(st.sampled_from(["round_robin", "contiguous"]), block_sizes, st.integers(1, 9))
def test_whole_blocks_are_never_cut(name, sizes, world_size):
    owners = make_owner_map(name, sizes, world_size)
    assert all(len(owners.owners(block)) == 1 for block in range(len(sizes)))


def test_round_robin_and_contiguous_assign_blocks_as_named():
    spread, packed = OwnerMap.round_robin(5, 2), OwnerMap.contiguous(5, 2)
    assert [spread.blocks_of(rank) for rank in (0, 1)] == [[0, 2, 4], [1, 3]]
    assert [packed.blocks_of(rank) for rank in (0, 1)] == [[0, 1, 2], [3, 4]]
    assert (spread.fraction_of(0), OwnerMap.contiguous(2, 4).blocks_of(3)) == (0.6, [])


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: m.owners(5), "block from 0 to 4"), (lambda m: m.owns(2, 0), "rank from 0 to 1"),
    (lambda m: m.fraction_of(-1), "rank from 0 to 1"),
    (lambda m: OwnerMap.round_robin(0, 2), "0 blocks"),
    (lambda m: OwnerMap.contiguous(0, 2), "0 blocks"),
    (lambda m: make_owner_map("blanced", [64], 1), "did you mean balanced?"),
])  # fmt: skip
def test_values_out_of_range_are_errors(call, message):
    with pytest.raises(UsageError) as caught:
        call(OwnerMap.round_robin(5, 2))
    assert message in str(caught.value)


def _llama(hidden: int, inner: int, kv: int, layers: int, vocab: int, *, bias: bool) -> list[int]:
    """Return the elements of each unit: the root (norm and tied embedding), then the blocks."""
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    return [hidden + vocab * hidden, *[block + bias * (hidden + 2 * kv)] * layers]


# Root first, then units in order, as engine and plan divide these models.
GPT2_BLOCK = 12 * 768 * 768 + 13 * 768
UNTIED_8B = _llama(4096, 14336, 1024, 32, 0, bias=False)
MODELS = {
    "gpt2": [2 * 768 + 50257 * 768 + 1024 * 768, *[GPT2_BLOCK] * 12],
    "llama3_8b": [UNTIED_8B[0], 128256 * 4096, *UNTIED_8B[1:], 128256 * 4096],
    "llama3.2_1b": _llama(2048, 8192, 512, 16, 128256, bias=False),
    "qwen2.5_0.5b": _llama(896, 4864, 128, 24, 151936, bias=True),
}


def test_the_models_have_their_published_sizes():
    billions = {name: round(sum(sizes) / 1e9, 3) for name, sizes in MODELS.items()}
    assert billions == {
        "gpt2": 0.124, "llama3_8b": 8.03, "llama3.2_1b": 1.236, "qwen2.5_0.5b": 0.494,
    }  # fmt: skip


@pytest.mark.parametrize("world_size", [4, 8, 64])
@pytest.mark.parametrize("model", list(MODELS))
def test_the_balanced_map_is_balanced_for_real_models(model, world_size):
    sizes = [round_up(size, ALIGNMENT) for size in MODELS[model]]
    owners = OwnerMap.balanced(sizes, world_size)
    assert max(map(owners.fraction_of, range(owners.world_size))) * owners.world_size <= 1.01
