"""Activation checkpointing of each block."""

import pytest

from fsdpctl.errors import UsageError
from fsdpctl.plan.recomputation import (
    LEVELS,
    MODES,
    block_checkpointing,
    normalize_blocks,
    one_of_each,
    recomputation_steps,
)


@pytest.mark.parametrize("count", [1, 2, 3, 32])
@pytest.mark.parametrize("modes", [LEVELS, MODES, MODES[1:], MODES[:1]])
def test_each_step_of_the_chain_treats_one_block_more_heavily(count, modes):
    def weights(name: str, blocks: str | None) -> list[int]:
        treated = block_checkpointing(name, blocks, count, offload=False)
        return [MODES.index(mode) + sends for mode, sends in treated]

    steps = [weights(*each) for each in recomputation_steps(count, modes)]
    assert steps[0] == [LEVELS.index(modes[0])] * count
    for before, after in zip(steps, steps[1:], strict=False):
        assert sum(after) == sum(before) + 1
        assert after == sorted(after, reverse=True)  # the heaviest first
    last = LEVELS.index(modes[-1])
    assert steps[-1] == [last] * (count - 1) + [last - (modes[-1] == "offload")]


@pytest.mark.parametrize(("text", "same"), [
    ("full:20,selective:8", "full:20,selective:8"), ("[offload:1, full:2]", "offload:1,full:2"),
    (" selective:007 ", "selective:7"),
])  # fmt: skip
def test_numbers_of_blocks_have_one_spelling(text, same):
    assert normalize_blocks(text) == same


@pytest.mark.parametrize(("text", "message"), [
    ("full", "expected numbers of blocks such as"), ("full:0", "expected numbers of blocks"),
    ("full:-1", "expected numbers"), ("full:1.5", "expected numbers"), ("full:²", "expected numb"),
    ("selectiv:2", "did you mean selective?"), ("none:2", "with offload, full, selective"),
    ("selective:1,full:2", "full after selective; expected the order offload, full, selective"),
    ("full:1,full:2", "full after full"), ("full:1,", "expected numbers"), ("", "expected numb"),
])  # fmt: skip
def test_a_wrong_number_of_blocks_is_one_line(text, message):
    with pytest.raises(UsageError, match=message) as error:
        normalize_blocks(text)
    assert str(error.value).startswith(f"activation_checkpointing.blocks={text}: ")


def test_few_blocks_have_one_of_each_treatment_and_one_of_the_others():
    settings = [one_of_each("offload:4,full:20,selective:8", count) for count in (1, 2, 3, 4, 9)]
    of_three = "offload:1,full:1,selective:1"
    assert settings == [None, "offload:1", "offload:1,full:1", of_three, of_three]
    assert one_of_each(None, 3) is None


def test_more_blocks_than_a_model_has_are_refused():
    assert len(block_checkpointing("none", "full:2,selective:1", 3, offload=False)) == 3
    with pytest.raises(UsageError, match="full:2,selective:2: 4 blocks, but the model has 3"):
        block_checkpointing("none", "full:2,selective:2", 3, offload=False)
