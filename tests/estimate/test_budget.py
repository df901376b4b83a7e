"""`activation_checkpointing=auto` recomputes as few blocks as the memory requires."""

import random

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Filled
from fsdpctl.estimate.candidates import SearchSpace
from fsdpctl.estimate.cluster_specs import with_specs
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate, memory_errors
from fsdpctl.estimate.search import rank_candidates
from fsdpctl.plan.recomputation import BLOCKS
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.commands.run import invoke
from tests.predict.test_total import check

LARGE = ["model=llama3_8b", "cluster=8xh100", "train.seq_len=8192", "train.micro_batch_size=1"]
FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "gpt_oss")


def placed(*args: str) -> Filled:
    return prepare(compose_config(args), ESTIMATE_ROLE).config


def check_edge(config: Filled, estimator: Estimator) -> RunEstimate:
    """Check that the selection fits the budget, and that no lighter recomputation does.

    Memory falls and time rises with recomputation, so the selection is the fastest that fits.
    """
    config = with_specs(config)[0]
    ranking = rank_candidates(estimator, config)
    axes = SearchSpace.of(config, config.model.num_layers)
    assert ranking.ranked
    index = axes.recomputations.index(ranking.selection.recomputation)
    plans = [
        axes.plan(axes.point(config.strategy.name, each, 0, most_prefetch=True))
        for each in range(max(index - 3, 0), min(index + 2, len(axes.recomputations)))
    ]
    estimates = [*map(estimator.estimate, plans)]
    budget = estimates[0].available - estimates[0].reserve
    fits = [each.fits and each.peak_reserved <= budget for each in estimates]
    lighter = min(index, 3)
    assert fits[:lighter] == [False] * lighter, (ranking.selection, index, config)
    assert fits[lighter], (ranking.selection, config)
    seconds = [estimator.predict(each).seconds for each in plans]
    assert seconds == sorted(seconds), config
    return estimates[lighter]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [30, 40, 46, 56, 72])
def test_an_estimate_fills_the_budget_and_no_block_more_can_be_kept(memory):
    args = [*LARGE, "activation_checkpointing=auto", f"cluster.memory={memory}"]
    edge = check_edge(placed(*args), Estimator())
    code, text = invoke("estimate-memory", *args)
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert (code, edge.kind) == (0, "dense")
    assert f"activation_checkpointing={edge.config.activation_checkpointing.name}" in lines["auto"]
    if blocks := edge.config.activation_checkpointing.blocks:
        assert f"{BLOCKS}={blocks}" in lines["auto"]
        assert Estimator().estimate(edge.plan).peak_reserved == edge.peak_reserved
    missed = -min(memory_errors()["dense"])
    assert edge.reserve == int(max(0.05, missed) * edge.available)
    assert f"the {missed:.0%} that a selection leaves" in lines["verdict"]


@pytest.mark.slow
def test_inputs_go_to_the_host_only_if_whole_recomputation_does_not_fit():
    args = ["model=llama3_8b", "model.num_layers=9", "cluster=8xh100", "train.seq_len=65536"]
    args += ["train.global_batch_size=8", "train.loss_chunk_tokens=1024"]
    estimator = Estimator()
    auto = ["activation_checkpointing=auto", "prefetch=both"]
    here = [*args, *auto, "activation_checkpointing.offload=false", "cluster.memory=20"]
    least = rank_candidates(estimator, placed(*here)).estimate  # the closest
    need = least.peak_reserved / (1 - least.reserve_share)
    for room, sends in ((1.001, False), (0.97, True)):
        memory = (need * room + least.outside_allocator.high) / 2**30
        settings = placed(*args, *auto, f"cluster.memory={memory:.9f}")
        edge = check_edge(settings, estimator).config.activation_checkpointing
        assert (edge.offloads_inputs, edge.offload) == (sends, False)
    compiled = placed(*args, *auto, f"cluster.memory={memory:.9f}", "train.compile=true")
    tight = rank_candidates(estimator, compiled).estimate
    assert not tight.leaves_reserve
    assert not tight.config.activation_checkpointing.offloads_inputs


def drawn(seed: int) -> list[str]:
    """Return a small model of one of several families, with more or fewer blocks, on CPU ranks."""
    draw = random.Random(f"budget {seed}")
    family, heads = draw.choice(FAMILIES), draw.choice([2, 4])
    args = [
        f"model.overrides.model_type={family}", f"model.num_layers={draw.randint(3, 13)}",
        f"model.num_heads={heads}", f"model.num_kv_heads={draw.choice([1, heads])}",
        f"model.hidden_size={heads * draw.choice([16, 32])}", "model.vocab_size=96",
        f"model.intermediate_size={draw.choice([64, 160])}", "launch.device=cpu",
        "launch.nproc_per_node=1", f"train.seq_len={draw.choice([48, 128, 200])}",
        f"train.micro_batch_size={draw.choice([1, 3])}", "train.global_batch_size=6",
        f"precision={draw.choice(['fp32', 'bf16'])}", "strategy=full_shard",
    ]  # fmt: skip
    if family in ("qwen3_moe", "gpt_oss"):
        args += ["model.overrides.num_experts_per_tok=2"]
        name = "num_experts" if family == "qwen3_moe" else "num_local_experts"
        args += [f"model.overrides.{name}=4"]
    if draw.random() < 0.3:
        args += ["model.lora.rank=4"]
    return args


def between(args: list[str], share: float, estimator: Estimator) -> Filled:
    """Return a configuration with memory for a share of the recomputable activations."""
    most, least = (
        estimator.estimate(make_run_plan(placed(*args, f"activation_checkpointing={each}")))
        for each in ("none", "full")
    )
    room = share * (most.peak_reserved - least.peak_reserved)
    memory = (least.peak_reserved + room + least.outside_allocator.high) / 2**30
    return placed(*args, "activation_checkpointing=auto", f"cluster.memory={memory:.9f}")


def test_a_small_run_on_cpu_ranks_fills_its_memory():
    estimator = Estimator()
    edge = check_edge(between(drawn(0), 0.5, estimator), estimator)
    assert edge.config.activation_checkpointing.blocks
    check(edge.config, 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_drawn_models_fill_drawn_memories_and_run_in_the_estimated_bytes(part):
    draw, mixed = random.Random(f"memories {part}"), 0
    for seed in range(10 * part, 10 * part + 10):
        estimator = Estimator()
        edge = check_edge(between(drawn(seed), draw.uniform(0.02, 0.98), estimator), estimator)
        mixed += edge.config.activation_checkpointing.blocks is not None
        torch.manual_seed(seed)
        check(edge.config, 0)
    assert mixed >= 5
