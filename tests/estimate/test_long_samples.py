"""Savings for long samples: full recomputation, context parallelism, offload, and chunks."""

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.memory_savings import CHUNKED_MLP, CONTEXT_PARALLEL
from fsdpctl.estimate.suggestions import suggest
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan

SMALL = [
    "model=llama3_1b", "model.num_layers=6", "cluster=h100", "cluster.memory=9GiB",
    "launch.nproc_per_node=4", "train.global_batch_size=4", "model.vocab_size=1000",
    "model.max_seq_len=10000000",
]  # fmt: skip


def planned(*more: str) -> RunPlan:
    return make_run_plan(prepare(compose_config([*SMALL, *more]), ESTIMATE_ROLE).config)


def test_samples_are_shared_by_divisors_of_a_node_and_of_the_heads():
    plan = planned("train.seq_len=32768")
    results = [change.settings for change in CONTEXT_PARALLEL.suggestions(plan)]
    args = "train.context_parallel=2", "train.context_parallel=4"
    assert results == [(arg, "train.micro_batch_size=1") for arg in args]
    assert not [*CONTEXT_PARALLEL.suggestions(planned("train.seq_len=4096"))]
    shared = planned("train.seq_len=32768", "train.context_parallel=2")
    (change,) = CONTEXT_PARALLEL.suggestions(shared)
    assert change.settings[0] == "train.context_parallel=4"
    (chunks,) = CHUNKED_MLP.suggestions(plan)
    assert chunks.settings == ("train.mlp_chunk_tokens=auto",)


@pytest.mark.slow
def test_a_long_sample_is_advised_to_be_shared():
    plan = planned("train.seq_len=131072", "activation_checkpointing=full")
    assert Estimator().estimate(plan).verdict != "fits"
    changes = [change.settings for change, _ in suggest(Estimator(), plan)]
    assert any("train.context_parallel" in arg for args in changes for arg in args)
