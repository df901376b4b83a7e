"""What lets longer samples fit: full recomputation, shared samples, the host, and chunks."""

from dataclasses import replace

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.estimate.advice import advice
from fsdpctl.estimate.changes import feed_forward_in_chunks, shared_samples
from fsdpctl.estimate.estimator import Estimator, placed_for_estimate
from fsdpctl.estimate.fit import largest_that_fits, longer_samples

SMALL = [
    "model=llama3_1b", "model.num_layers=6", "cluster=h100", "cluster.memory=9GiB",
    "launch.nproc_per_node=4", "train.global_batch_size=4", "model.vocab_size=1000",
    "model.max_seq_len=100000000",
]  # fmt: skip


def placed(*more: str) -> Config:
    return placed_for_estimate(compose_config([*SMALL, *more]).config)


def test_samples_are_shared_by_divisors_of_a_node_and_of_the_heads():
    found = [change.words for change in shared_samples(placed("train.seq_len=32768"))]
    assert found == [
        (f"train.context_parallel={count}", "train.micro_batch_size=1") for count in (2, 4)
    ]
    assert not [*shared_samples(placed("train.seq_len=4096"))]
    given = placed("train.seq_len=32768", "train.context_parallel=2")
    assert [change.words[0] for change in shared_samples(given)] == ["train.context_parallel=4"]
    (chunks,) = feed_forward_in_chunks(placed("train.seq_len=32768"))
    assert chunks.words == ("train.mlp_chunk_tokens=auto",)


@pytest.mark.slow
def test_a_long_sample_is_advised_to_be_shared():
    config = placed("train.seq_len=131072", "activation_checkpointing=full")
    assert Estimator().estimate(config).verdict != "fits"
    changes = [change.words for change, _ in advice(Estimator(), config)]
    assert any("train.context_parallel" in word for words in changes for word in words)


@pytest.mark.slow
def test_each_setting_makes_longer_samples_fit():
    config = placed()
    first = largest_that_fits(Estimator(), config, "seq_len")
    found = list(longer_samples(Estimator(), config, first))
    assert len(found) == 4
    lengths = [first.value, *(fit.value for _, fit in found)]
    assert lengths == sorted(set(lengths))
    assert lengths[2] > 3 * lengths[1]  # shared by four ranks
    words, last = found[-1]
    settings = [*words, f"train.seq_len={last.value}"]
    again = placed(*settings)
    assert Estimator().estimate(again).verdict == "fits"
    longer = replace(again, train=replace(again.train, seq_len=2 * last.value))
    assert Estimator().estimate(longer).verdict != "fits"
