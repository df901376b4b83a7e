"""What lets longer samples fit: full recomputation, shared samples, the host, and chunks."""

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.advice import advice
from fsdpctl.estimate.changes import FEED_FORWARD_IN_CHUNKS, SHARED_SAMPLES
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.resolve.launchers import CLUSTER
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.settle import RunPlan, settle

SMALL = [
    "model=llama3_1b", "model.num_layers=6", "cluster=h100", "cluster.memory=9GiB",
    "launch.nproc_per_node=4", "train.global_batch_size=4", "model.vocab_size=1000",
    "model.max_seq_len=10000000",
]  # fmt: skip


def planned(*more: str) -> RunPlan:
    return settle(prepare(compose_config([*SMALL, *more]), CLUSTER).config)


def test_samples_are_shared_by_divisors_of_a_node_and_of_the_heads():
    found = [change.words for change in SHARED_SAMPLES.changes(planned("train.seq_len=32768"))]
    words = "train.context_parallel=2", "train.context_parallel=4"
    assert found == [(word, "train.micro_batch_size=1") for word in words]
    assert not [*SHARED_SAMPLES.changes(planned("train.seq_len=4096"))]
    given = planned("train.seq_len=32768", "train.context_parallel=2")
    (change,) = SHARED_SAMPLES.changes(given)
    assert change.words[0] == "train.context_parallel=4"
    (chunks,) = FEED_FORWARD_IN_CHUNKS.changes(planned("train.seq_len=32768"))
    assert chunks.words == ("train.mlp_chunk_tokens=auto",)


@pytest.mark.slow
def test_a_long_sample_is_advised_to_be_shared():
    plan = planned("train.seq_len=131072", "activation_checkpointing=full")
    assert Estimator().estimate(plan).verdict != "fits"
    changes = [change.words for change, _ in advice(Estimator(), plan)]
    assert any("train.context_parallel" in word for words in changes for word in words)
