"""The distribution of samples to ranks and micro-batches."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpctl.errors import UsageError
from fsdpctl.plan.batch_plan import plan_batches


@given(st.integers(1, 12), st.integers(0, 50), st.data())
def test_every_sample_is_processed_exactly_once(world_size, more, data):
    samples = world_size + more
    micro = data.draw(st.one_of(st.none(), st.integers(1, -(-samples // world_size))))
    plan = plan_batches(samples, world_size, micro_batch_size=micro)
    pairs = product(range(world_size), range(plan.num_micro_batches))
    seen = [sample for rank, index in pairs for sample in plan.samples(rank, index)]
    assert seen == list(range(samples))


def test_the_micro_batch_follows_from_the_number_of_steps():
    plan = plan_batches(16, 2, num_micro_batches=4)
    assert (plan.micro_batch_size, plan.num_micro_batches) == (2, 4)


@pytest.mark.parametrize(("samples", "ranks", "more", "arg"), [
    (3, 4, {}, "global_batch_size=3"), (8, 2, {"micro_batch_size": 5}, "micro_batch_size=5"),
    (8, 2, {"micro_batch_size": 2, "num_micro_batches": 3}, "accumulation.steps=3"),
])  # fmt: skip
def test_conflicting_sizes_are_rejected(samples, ranks, more, arg):
    with pytest.raises(UsageError, match=arg):
        plan_batches(samples, ranks, **more)
