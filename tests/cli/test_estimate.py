"""`fsdpctl estimate-memory` as a person or a program reads it."""

import json

import pytest

from fsdpctl.plan.strategy import STRATEGIES
from tests.cli.run import invoke

H100 = ["model=llama3_8b", "cluster=h100"]


def test_one_strategy_as_json():
    code, text = invoke("estimate-memory", *H100, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["strategy"] == "full_shard"
    assert found["peak_allocated_bytes"] == sum(found["breakdown"].values())
    assert found["verdict"] is None
    assert found["peak_reserved_bytes"] is None
    assert not found["counts_activations"]
    assert found["breakdown"]["parameters"] >= 4 * found["num_parameters"] / 8


def test_every_strategy_as_json():
    code, text = invoke("estimate-memory", *H100, "--all-strategies", "--json")
    found = {each["strategy"]: each for each in json.loads(text)}
    assert code == 0
    assert list(found) == list(STRATEGIES)
    assert found["no_shard"]["verdict"] == "too_large"
    least = min(found.values(), key=lambda each: each["peak_allocated_bytes"])
    assert least["strategy"] == "full_shard"


def test_for_people_it_says_what_is_not_counted():
    code, text = invoke("estimate-memory", *H100, "--all-strategies")
    assert code == 0
    assert all(name in text for name in STRATEGIES)
    assert "activations" in text
    assert "not counted" in text
    assert "cluster=h100" in text


def test_more_ranks_than_samples_are_no_mistake_here():
    code, text = invoke("estimate-memory", *H100, "launch.nnodes=64", "--json")
    assert code == 0
    assert json.loads(text)["world_size"] == 512


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["clutser=h100"], "did you mean cluster?"),
        (["cluster.memory=0"], "cluster.memory=0"),
        (["strategy=hybrid_shard", "strategy.dp_shard_size=3"], "must divide the 8 ranks"),
        (["strategy.owner_map=balanced"], "only shard_optimizer"),
        (["model.num_heads=5"], "must divide"),
        (["--recipe", "nothing"], "nothing"),
    ],
)
def test_mistakes_are_answered_in_one_line(words, part):
    code, said = invoke("estimate-memory", *H100, *words)
    assert code == 2
    assert part in said
    assert "\n" not in said.strip()
