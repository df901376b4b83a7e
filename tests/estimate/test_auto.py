"""The selection of settings that are `auto`."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fsdpctl.config.clusters import gpu_by_name
from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.options import options_of
from fsdpctl.config.schema import Config, Filled
from fsdpctl.config.selection import PREFETCHES, Selection, auto_names, with_selection
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.errors import UsageError
from fsdpctl.estimate.candidates import Ranking, SearchSpace
from fsdpctl.estimate.cluster_specs import with_specs
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.search import MOST_RANKED, rank_candidates
from fsdpctl.estimate.summary import describe_ranking
from fsdpctl.plan.recomputation import MODES, Recomputation
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.matrix import fast

OPEN = [
    "strategy=auto", "activation_checkpointing=auto", "prefetch=auto",
    "train.micro_batch_size=auto",
]  # fmt: skip
TOY = [
    "model.num_layers=2", "model.hidden_size=128", "model.intermediate_size=256",
    "model.num_heads=2", "model.num_kv_heads=2", "model.vocab_size=512", "train.seq_len=128",
    "train.global_batch_size=8", "launch.device=cpu", "launch.nproc_per_node=2",
    "launch.share_memory=false",
]  # fmt: skip
TIE = 1.01
LIMITS = (0.5066, 0.5074, 0.5082, 0.5101, 0.5106, 0.5158, 4)  # GiB; each allows another selection


def composed(*args: str) -> Composed:
    named = {arg.partition("=")[0] for arg in args}
    return compose_config([*(arg for arg in TOY if arg.partition("=")[0] not in named), *args])


def placed(*args: str) -> Filled:
    return prepare(composed(*args), ESTIMATE_ROLE).config


def axes_of(config: Filled) -> SearchSpace:
    return SearchSpace.of(config, config.model.num_layers)


@cache
def ranking(*args: str) -> Ranking:
    return rank_candidates(Estimator(), placed(*args))


def test_without_a_limit_nothing_is_recomputed_and_the_share_is_one_micro_batch():
    result = ranking(*OPEN)
    assert result.selection.recomputation.text == "none"
    assert result.selection.micro_batch_size == 4
    assert result.names == auto_names(compose_config(OPEN).config)
    texts = {each.selection.text(result.names) for each in result.ranked}
    assert len(texts) == len(result.ranked) == MOST_RANKED


def test_the_selection_is_the_same_every_time():
    first, second = ranking(*OPEN), ranking.__wrapped__(*OPEN)
    assert first.to_dict() == second.to_dict()
    assert list(describe_ranking(first)) == list(describe_ranking(second))


@pytest.mark.slow
@pytest.mark.parametrize("memory", fast(0.512, slow=LIMITS))
def test_no_combination_that_fits_is_predicted_to_be_faster_than_the_selected_one(memory):
    """Estimate and predict all combinations, also those that the search skips."""
    args = [*OPEN, f"cluster.memory={memory}"]
    result, estimator = ranking(*args), Estimator()
    axes = axes_of(with_specs(placed(*args))[0])
    fitting = []
    for strategy in axes.strategies:
        for mode in range(len(axes.recomputations)):
            for index in range(len(axes.sizes)):
                point = axes.point(strategy, mode, index, most_prefetch=True)
                for prefetch in range(point.prefetch + 1):
                    plan = axes.plan(point._replace(prefetch=prefetch))
                    if estimator.estimate(plan).verdict == "fits":
                        fitting.append(estimator.predict(plan).seconds)
    assert result.estimate.verdict == "fits"
    assert result.ranked[0].seconds <= TIE * min(fitting)


def test_the_least_memory_is_found_if_it_is_the_whole_share_at_once():
    """With several micro-batches, gradients between them take more than the smaller size saves."""
    args = [
        "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=1", "model.hidden_size=256",
        "model.intermediate_size=768", "model.vocab_size=256", "train.seq_len=64",
        "train.global_batch_size=4", *OPEN,
    ]  # fmt: skip
    estimator, axes = Estimator(), axes_of(with_specs(placed(*args))[0])
    last = len(axes.sizes) - 1
    full = axes.modes[2]
    points = (axes.point("full_shard", full, size, most_prefetch=False) for size in (last, 0))
    one, several = (estimator.estimate(axes.plan(point)) for point in points)
    assert one.peak_reserved < several.peak_reserved
    memory = (1.001 * one.peak_reserved + one.memory_bytes - one.available) / (1 << 30)
    result = ranking(*args, f"cluster.memory={memory}")
    assert result.estimate.verdict == "fits"
    assert result.selection.micro_batch_size == axes.sizes[last]


def test_less_memory_leads_to_another_selection():
    seen = [ranking(*OPEN, f"cluster.memory={memory}") for memory in (0.506, 0.5066, 0.512, 4)]
    assert not seen[0].ranked
    assert len({each.selection.text(each.names) for each in seen[1:]}) == 3
    seconds = [each.ranked[0].seconds for each in seen[1:]]
    assert seconds == sorted(seconds, reverse=True)


def test_a_tie_is_decided_by_memory():
    """If links cost nothing, strategies differ in memory alone."""
    free = ["cluster=h100", "cluster.intra_bandwidth=1e6", "launch.device=cuda"]
    large = ["model.hidden_size=2048", "train.seq_len=1024"]
    result = ranking(*free, *large, "strategy=auto", "prefetch=auto")
    assert (result.selection.strategy, result.selection.prefetch.name) == ("full_shard", "none")
    fastest = min(result.ranked, key=lambda each: each.seconds)
    assert fastest is not result.ranked[0]
    assert fastest.estimate.peak_reserved > result.estimate.peak_reserved
    assert result.ranked[0].seconds <= TIE * fastest.seconds
    assert "least memory among the fastest of" in list(describe_ranking(result))[1]


def test_settings_that_are_not_auto_are_kept():
    result = ranking(*OPEN[1:], "strategy=no_shard")
    assert result.names == ("activation_checkpointing", "prefetch", "train.micro_batch_size")
    assert {each.selection.strategy for each in result.ranked} == {"no_shard"}
    result = ranking("strategy=auto", "train.micro_batch_size=2", "activation_checkpointing=full")
    assert {each.selection.micro_batch_size for each in result.ranked} == {2}
    assert {each.selection.recomputation.text for each in result.ranked} == {"full"}
    result = ranking(*OPEN, "accumulation.steps=4")
    assert result.selection.micro_batch_size == 1
    with pytest.raises(UsageError, match="accumulation.steps=3: expected 2 or auto for 8 samples"):
        ranking(*OPEN, "accumulation.steps=3")


def test_a_micro_batch_that_is_not_set_is_the_whole_share_of_a_rank():
    config = compose_config(TOY).config
    assert (auto_names(config), "train.micro_batch_size" in config_to_yaml(config)) == ((), False)
    assert auto_names(compose_config([*TOY, "train.micro_batch_size=auto"]).config)
    assert compose_config([*TOY, "train.micro_batch_size=none"]).config == config
    result = ranking("strategy=auto", "cluster.memory=4")
    assert result.estimate.batches.micro_batch_size == 4
    assert "micro_batch" not in result.selection.text(result.names)


def test_replicas_are_candidates_on_several_nodes_or_if_their_size_is_set():
    hybrid = {name for name, row in STRATEGIES.items() if row.replicates}
    four = ["strategy=auto", "launch.nproc_per_node=4"]
    assert not hybrid & set(axes_of(placed(*four)).strategies)
    assert hybrid <= set(axes_of(placed(*four, "strategy.dp_shard_size=2")).strategies)
    nodes = ["strategy=auto", "launch.nnodes=2", "cluster=h100", "launch.device=cuda"]
    assert hybrid <= set(axes_of(placed(*nodes)).strategies)
    with pytest.raises(UsageError, match="must divide the 4 ranks"):
        ranking(*four, "strategy.dp_shard_size=3")


def test_equivalent_strategies_are_one_candidate():
    assert axes_of(placed("strategy=auto", "launch.nproc_per_node=1")).strategies == ("no_shard",)
    assert axes_of(placed("strategy=auto", "prefetch=auto")).count == 1 + 1 + 2 + 3


def test_candidates_are_those_that_the_engine_supports():
    assert axes_of(placed("strategy=auto", "engine=ddp")).strategies == ("no_shard",)
    assert STRATEGIES[ranking(*OPEN, "engine=fsdp2").selection.strategy].shards_params


def test_if_nothing_fits_one_line_names_the_closest_combination():
    result = ranking(*OPEN, "cluster.memory=0.2")
    assert result.summary.startswith("nothing fits; closest is strategy=")
    assert "train.micro_batch_size=1" in result.summary
    assert "\n" not in result.summary
    result = ranking(*OPEN, "strategy.offload=states,gradients", "cluster.host_memory=2MiB")
    needed = result.estimate.node_host_bytes / (1 << 30)
    assert f"host memory: about {needed:.2f} GiB needed per node, 2.0 MiB avail" in result.summary


def test_sizes_of_a_share_that_does_not_halve_are_its_divisors_and_rounded_halves():
    sizes = axes_of(placed("train.micro_batch_size=auto", "train.global_batch_size=26")).sizes
    assert sizes == (1, 2, 4, 7, 13)
    sizes = axes_of(placed("train.micro_batch_size=auto", "train.global_batch_size=24")).sizes
    assert sizes == (1, 2, 3, 4, 6, 12)


def test_a_ranking_is_described_by_selection_reason_and_runner_up():
    lines = list(describe_ranking(ranking(*OPEN, "cluster=h100", "launch.device=cuda")))
    assert [line.split()[0] for line in lines] == ["auto", "reason", "next"]
    source = "specs of cluster=h100; short steps: untested, up to twice as fast or slow"
    assert f"s/step predicted ({source})" in lines[1]
    assert "%), " in lines[2]


def test_there_is_a_runner_up_if_anything_else_fits():
    of_modes = ranking("activation_checkpointing=auto")
    modes = [each.selection.recomputation.text for each in of_modes.ranked]
    assert modes == ["none", "selective", "full"]
    of_prefetch = ranking("prefetch=auto")
    assert {c.selection.prefetch.name for c in of_prefetch.ranked} == {"none", "backward", "both"}
    seconds = [each.seconds for each in of_prefetch.ranked[1:]]
    assert seconds == sorted(seconds)
    alone = ranking("prefetch=auto", "strategy=no_shard")
    assert "nothing else fits" in list(describe_ranking(alone))[2]


def test_a_run_selects_for_the_ranks_that_it_has_here():
    config = prepare(composed(*OPEN)).config
    assert rank_candidates(Estimator(), config).to_dict() == ranking(*OPEN).to_dict()


def test_the_name_of_a_run_does_not_depend_on_the_selection():
    runs = [prepare(each) for each in (composed(*OPEN), composed())]
    assert runs[0].config.train.run_dir == runs[1].config.train.run_dir


def test_a_selected_micro_batch_is_limited_to_the_share_of_a_rank():
    base = prepare(composed("train.micro_batch_size=auto")).config
    selection = Selection.of(base)
    large, small = (replace(selection, micro_batch_size=size) for size in (64, 2))
    assert make_run_plan(base, large).batches.micro_batch_size == 4
    assert make_run_plan(base, small).batches.micro_batch_size == 2
    one = replace(base.launch, nproc_per_node=1)
    assert make_run_plan(base, large, one).batches.micro_batch_size == 8
    shared = replace(base, train=replace(base.train, context_parallel=2))
    with pytest.raises(UsageError, match="context_parallel=2: expected a divisor of the 1 ranks"):
        make_run_plan(shared, selection, one)  # fewer ranks than share a sample


def test_a_selection_fills_in_what_is_auto_and_nothing_else():
    config = compose_config([*OPEN, "strategy.dp_shard_size=2", "optimizer.lr=0.5"]).config
    filled = with_selection(config, Selection.of(compose_config(["strategy=hybrid_shard"]).config))
    assert auto_names(filled) == ()
    assert (filled.strategy.name, filled.strategy.dp_shard_size) == ("hybrid_shard", 2)
    assert filled.optimizer == config.optimizer
    assert with_selection(filled, Selection.of(Config())) == filled


@pytest.mark.parametrize(("args", "error"), [
    (["prefetch=auto", "prefetch.forward=2"], "prefetch.forward=2: conflicts with prefetch=auto"),
    (["train.micro_batch_size=0"], "expected a whole number from 1 to"),
    (["auto.probe=false"], "auto.probe: no such key; not needed: `auto` selects by prediction"),
])  # fmt: skip
def test_conflicting_settings_are_reported_in_one_line(args, error):
    with pytest.raises(UsageError, match=error):
        prepare(compose_config(args), ESTIMATE_ROLE)


def test_candidates_are_the_options_of_conf():
    named = {each.name: each for each in PREFETCHES}
    assert {*named, "auto"} == set(options_of("prefetch"))
    for name, each in named.items():
        assert compose_config([f"prefetch={name}"]).config.prefetch == each
    assert {*MODES, "auto"} == set(options_of("activation_checkpointing"))
    assert {*STRATEGIES, "auto"} == set(options_of("strategy"))


@pytest.mark.parametrize(("name", "cluster"), [
    ("NVIDIA A100-SXM4-40GB", "a100_40"), ("NVIDIA A100-SXM4-80GB", "a100_80"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100_pcie"),
    ("NVIDIA H100 NVL", "h100_nvl"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"),
    ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("NVIDIA GeForce RTX 5090", "rtx5090"), ("Tesla T4", "t4"), ("Tesla K80", None),
])  # fmt: skip
def test_devices_are_known_by_their_names(name, cluster):
    gpu = gpu_by_name(name)
    assert (gpu and gpu.cluster) == cluster
    if cluster is not None:
        described = compose_config([f"cluster={cluster}"]).config.cluster
        for figure in ("flops", "memory_bandwidth", "intra_bandwidth", "inter_bandwidth"):
            assert getattr(described, figure) > 0


def test_specs_that_are_set_are_not_assumed():
    by_hand = ("cluster.flops=7", "cluster.memory_bandwidth=90", "strategy=full_shard")
    config, source = with_specs(placed(*by_hand))
    assert (config.cluster.flops, "assumed" in source) == (7, False)
    assert ranking("prefetch=auto", *by_hand).ranked
    assert "assumed CPU specs" in with_specs(placed())[1]
    assert "assumed" in ranking("strategy=auto", "launch.nnodes=2").spec_source
    on_gpu, source = with_specs(placed("launch.device=cuda"))
    assert on_gpu.cluster.flops is not None
    assert torch.cuda.is_available() or "assumed" in source
    plan = make_run_plan(with_specs(placed("strategy=full_shard"))[0])
    assert Estimator().predict(plan).seconds > 0


def test_inputs_of_blocks_are_only_on_the_host_if_something_is_recomputed():
    config = placed(*OPEN, "activation_checkpointing.offload=true")
    assert axes_of(config).recomputations == (Recomputation("selective"), Recomputation("full"))
    selection = Selection("full_shard", Recomputation("full"), config.prefetch, 1)
    assert with_selection(config, selection).activation_checkpointing.offload


def test_assumed_specs_have_no_error_band():
    known = ranking(*OPEN, "cluster=h100", "launch.device=cuda")
    assert known.to_dict()["ranked"][0]["error_band"]["kind"] == "short"
    assumed = replace(known, spec_source="assumed specs of cluster=h100, for no GPU")
    assert assumed.to_dict()["ranked"][0]["error_band"] is None
    assert "untested" not in list(describe_ranking(assumed))[1]
