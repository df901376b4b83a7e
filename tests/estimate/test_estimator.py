"""Estimates of configurations: verdicts, largest sizes and advice."""

import random
from contextlib import suppress
from itertools import pairwise

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import ActivationCheckpointingConfig
from fsdpctl.errors import UsageError
from fsdpctl.estimate.accuracy import error_kind, is_faster
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.largest import FIT_KEYS, largest_that_fits
from fsdpctl.estimate.resolve_auto import estimates_of
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.search import largest_true
from fsdpctl.estimate.suggestions import suggest
from fsdpctl.estimate.traced_model import MetaModule, TracedModel
from fsdpctl.models.build_model import build_model
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.predict.model_pass import ModelPass, PassPart, PassPosition
from fsdpctl.predict.peak import UnevenStepError
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan
from tests.matrix import fast, matrix
from tests.models.decoders import save_decoder

H100 = ["model=llama3_8b", "cluster=h100"]
BLOCKS = ["full:20", "[offload:2,full:12,selective:11]"]


def resolved(*args: str) -> RunPlan:
    return make_run_plan(prepare(compose_config(list(args)), ESTIMATE_ROLE).config)


def estimated(*args: str) -> RunEstimate:
    return Estimator().estimate(resolved(*args))


def test_auto_is_resolved_for_the_cluster_not_for_this_machine():
    estimate = estimated(*H100, "launch.nnodes=2")
    assert (estimate.config.launch.nproc_per_node, estimate.config.launch.device) == (8, "cuda")
    assert estimate.config.precision.param_dtype == "bfloat16"
    assert estimate.to_dict()["world_size"] == 16
    assert estimate.verdict == "fits"


def test_parts_add_up_and_peaks_are_in_order():
    for result, _ in estimates_of(Estimator(), compose_config(H100), all_strategies=True):
        assert sum(result.step.breakdown.values()) == result.allocated
        assert result.step.breakdown["rounding"] < 0.01 * result.allocated
        assert all(nbytes >= 0 for nbytes in result.step.breakdown.values())
        assert result.allocated <= min(result.step.reserved.values())
        assert result.step.breakdown["activations"] > 0


def test_a_memory_limit_changes_only_the_verdict():
    plain, limited = estimated(*H100), estimated(*H100, "cluster.memory=10GiB")
    assert plain.step.breakdown == limited.step.breakdown
    assert (plain.verdict, limited.verdict) == ("fits", "too_large")


@pytest.mark.slow
@matrix(
    model=["llama3_8b", "openai/gpt-oss-20b"],
    mode=["=none", "=selective", "=full", *(f".blocks={blocks}" for blocks in BLOCKS)],
)
def test_a_few_traced_blocks_represent_all(model, mode, monkeypatch):
    named = ["model=hf", f"model.path={model}"] if "/" in model else [f"model={model}"]
    args = [
        *named, "model.num_layers=36", "model.init=random", "cluster=h100", "train.seq_len=512",
    ]  # fmt: skip
    config = resolved(*args, f"activation_checkpointing{mode}").config
    short = TracedModel(config).model_pass(2, 512, 0, config.activation_checkpointing)
    assert len(short._traced_index) < 36
    monkeypatch.setattr(MetaModule, "repeated_units", lambda *_: [])
    whole = TracedModel(config).model_pass(2, 512, 0, config.activation_checkpointing)
    assert list(short.operations) == list(whole.operations)
    for position in short.operations:
        assert sized(short, position) == sized(whole, position), position
    assert short.gradients.keys() == whole.gradients.keys()


def sized(model_pass: ModelPass, position: PassPosition) -> list[tuple[int, str]]:
    """Return the operations of a part with the operator of each tensor; keys may differ."""
    return [
        (nbytes, model_pass.tensors[key].description if key >= 0 else "")
        for key, nbytes in model_pass.operations[position]
    ]


def test_blocks_that_differ_are_all_traced():
    args = ["model=qwen3_4b", "model.num_layers=9", "cluster=h100", "train.seq_len=256"]
    for arg in ("use_sliding_window=true", "sliding_window=64", "max_window_layers=4"):
        args.append(f"model.overrides.{arg}")
    traced = TracedModel(resolved(*args).config)
    operations = traced.model_pass(1, 256, 0, ActivationCheckpointingConfig()).operations
    layers = (PassPosition(PassPart.FORWARD, f"model.layers.{index}") for index in (3, 4))
    full, sliding = ([nbytes for _, nbytes in operations[layer]] for layer in layers)
    assert full != sliding


@pytest.mark.parametrize("largest", [0, 1, 31, 100, 356, 5000])
@pytest.mark.parametrize("first", [1, 5, 99, 100, 101, 4000, 5000])
def test_the_largest_value_is_found_in_few_trials(largest, first):
    tried = set[int]()

    def holds(value: int) -> bool:
        tried.add(value)
        return bool(value <= largest)

    assert largest_true(holds, 0, 5000, first) == largest
    assert {largest, largest + 1} <= tried | {0, 5001}
    assert len(tried) < 30


@pytest.mark.slow
@pytest.mark.parametrize("size", list(FIT_KEYS))
def test_the_largest_value_fits_and_the_next_does_not(size):
    draw = random.Random(size)
    for _ in range(4):
        args = [
            "model=llama3_1b", f"strategy={draw.choice(list(STRATEGIES))}",
            f"cluster.memory={draw.choice(['24GiB', '40GB', '80GiB'])}", "launch.device=cuda",
            f"launch.nproc_per_node={draw.choice([2, 8])}",
            f"activation_checkpointing={draw.choice(['none', 'full'])}",
            f"train.seq_len={draw.choice([1024, 2048])}",
            f"launch.allocator={draw.choice(['native', 'expandable'])}",
        ]  # fmt: skip
        result = largest_that_fits(Estimator(), resolved(*args), size)
        if result.estimate is None:
            continue
        again = [Estimator().estimate(each.plan) for each in (result.estimate, result.next) if each]
        assert [each.leaves_reserve for each in again] == [True, False][: len(again)], args


@pytest.mark.slow
@pytest.mark.parametrize("args", [
    [*H100, "train.seq_len=8192"], [*H100, "strategy=no_shard"],
    ["model=llama3_70b", "cluster=h100", "train.seq_len=4096", "strategy=shard_grad_op"],
    [*H100, "strategy=hybrid_shard", "strategy.dp_shard_size=2"],
    [*H100, "engine=ddp", "strategy=no_shard"],
    [*H100, "train.seq_len=8192", "train.micro_batch_size=4", "precision.param_dtype=float32"],
    [*H100, "train.loss_chunk_tokens=0", "accumulation=last", "accumulation.steps=4"],
])  # fmt: skip
def test_advised_settings_fit(args):
    limited = [*args, "train.global_batch_size=64", "cluster.memory=20GiB"]
    estimator, plan = Estimator(), resolved(*limited)
    changes = suggest(estimator, plan)
    assert estimator.estimate(plan).verdict != "fits"
    assert 1 <= len(changes) <= 3
    for change, estimate in changes:
        changed = {each.split("=")[0] for each in change.settings}
        remaining = [each for each in limited if each.split("=")[0] not in changed]
        typed = estimated(*remaining, *change.settings)
        assert (typed.verdict, typed.allocated) == ("fits", estimate.allocated)


@pytest.mark.slow
@pytest.mark.parametrize("memory", fast("6GiB", slow=["5GiB", "7GiB"]))
def test_each_of_several_settings_is_needed(memory):
    args = ["model=llama3_1b", "model.num_layers=6", "cluster=h100", f"cluster.memory={memory}"]
    args += ["launch.nproc_per_node=2", "train.global_batch_size=8", "train.seq_len=1024"]
    *suggestions, (adapted, _) = suggest(Estimator(), resolved(*args))
    assert adapted.settings[0] == "model.lora.rank=16"
    for change, _ in suggestions:
        assert len(change.settings) > 1
        for arg in change.settings:
            others = [each for each in change.settings if each != arg]
            with suppress(UsageError):  # some are only valid together
                assert estimated(*args, *others).verdict != "fits", arg
    *here, (on_nodes, _) = suggestions
    assert on_nodes.settings[-1].startswith("launch.nnodes=")
    assert not any("nnodes" in arg for change, _ in here for arg in change.settings)


@pytest.mark.slow
def test_replicas_that_do_not_fit_are_advised_to_shard_optimizer_states():
    args = ["model=llama3_70b", "cluster=h100", "launch.nnodes=8", "train.seq_len=8192"]
    args += ["train.micro_batch_size=1", "train.global_batch_size=64"]
    args += ["strategy=hybrid_shard", "activation_checkpointing=full"]
    plan = resolved(*args)
    suggestions = {change.settings: estimate for change, estimate in suggest(Estimator(), plan)}
    assert plan.config.strategy.dp_shard_size == 8
    assert suggestions[("strategy=hybrid_shard_optimizer",)].config.strategy.dp_shard_size == 8


@pytest.mark.slow
def test_changes_are_named_in_the_order_of_their_predicted_time():
    args = ["model=llama3_8b", "cluster=h100", "launch.nproc_per_node=4", "train.seq_len=512"]
    args += ["train.micro_batch_size=1", "cluster.memory=40GiB"]
    estimator = Estimator()
    *suggestions, (adapters, _) = suggest(estimator, resolved(*args))
    assert adapters.settings[0] == "model.lora.rank=16"  # trains less, and comes last
    seconds = [estimator.predict(change.plan).seconds for change, _ in suggestions]
    assert all(after > before * 0.98 for before, after in pairwise(seconds))
    named = {arg for change, _ in suggestions for arg in change.settings}
    assert {"optimizer.state_dtype=int8", "strategy.offload=states"} <= named


def test_torchs_default_steps_with_a_copy_of_the_second_moments():
    """The optimizer's step has five numbers per parameter: the peak if samples are short."""
    for engine, ranks in ((["engine=fsdp2"], 1), (["engine=ddp", "strategy=no_shard"], 4)):
        args = ["model=llama3_1b", f"cluster={ranks}xh100", "train.seq_len=16", *engine]
        args += ["train.micro_batch_size=1"]
        fused = estimated(*args)
        unfused = estimated(*args, "engine.program=transformers_foreach")
        assert fused.allocated < unfused.allocated
        assert unfused.allocated == pytest.approx(5 * 4 * unfused.num_params, rel=0.01)
        assert unfused.to_dict()["peak_at"] == "the optimizer's step"


def test_dropout_of_adapters_takes_time_but_no_memory():
    args = ["model=llama3_1b", "cluster=8xh100", "model.lora.rank=16"]
    estimator = Estimator()
    plans = [resolved(*args, f"model.lora.dropout={dropout}") for dropout in (0, 0.1)]
    without, with_it = map(estimator.estimate, plans)
    assert with_it.step.breakdown == without.step.breakdown
    with_seconds, seconds = (estimator.predict(plan).seconds for plan in reversed(plans))
    assert seconds < with_seconds < 1.4 * seconds


@pytest.mark.slow
def test_adapters_are_not_advised_to_round_their_moments():
    adapted = suggest(Estimator(), resolved(*H100, "model.lora.rank=8", "cluster.memory=6GiB"))
    assert adapted
    assert all("optimizer.state_dtype=int8" not in change.settings for change, _ in adapted)


@pytest.mark.slow
def test_long_samples_are_advised_to_send_inputs_to_the_host():
    args = ["model=llama3_8b", "cluster=h100", "train.seq_len=131072", "model.max_seq_len=131072"]
    args += ["train.micro_batch_size=1", "activation_checkpointing=full"]
    args += ["cluster.memory=50GiB", "train.mlp_chunk_tokens=4096"]
    suggestions = suggest(Estimator(), resolved(*args))
    result = {change.settings: estimate for change, estimate in suggestions}
    sent = next(result[each] for each in result if "activation_checkpointing.offload=true" in each)
    assert (sent.host_model_bytes, sent.verdict) == (31 * 131072 * 4096 * 2, "fits")


@pytest.mark.slow
def test_hundreds_of_billions_of_parameters_on_thousands_of_ranks():
    estimate = estimated("model=llama3_405b", "launch.nnodes=2048", "cluster=h100")
    assert (estimate.num_params, estimate.tokens_per_step) == (405_853_388_800, 16384 * 4096)
    assert module_units(build_model(estimate.config.model), None)[0].name == "root"


def test_other_engines_follow_the_optimizer_and_the_prefetch_depth():
    args = [*H100, "engine=fsdp2", "train.seq_len=128", "train.micro_batch_size=1"]
    usual = estimated(*args)
    far = estimated(*args, "prefetch.forward=30")
    assert far.allocated > usual.allocated + (8 << 30)  # most blocks, in bf16
    plain = estimated(*args, "optimizer=sgd", "optimizer.lr=1e-3", "optimizer.momentum=0")
    assert usual.step.breakdown["optimizer_states"] > 0
    assert plain.step.breakdown["optimizer_states"] == 0


def test_times_of_two_kinds_are_ordered_only_beyond_their_error_bands():
    plain, offloaded = estimated(*H100), estimated(*H100, "strategy.offload=states")
    assert is_faster((plain, 1.0), (plain, 1.02))
    assert not is_faster((plain, 1.0), (plain, 1.005))
    assert (error_kind(plain), error_kind(offloaded)) == ("dense", "offloaded")
    assert not is_faster((plain, 1.0), (offloaded, 1.9))  # untested: may be twice as fast
    assert not is_faster((offloaded, 0.9), (plain, 1.0))
    assert is_faster((plain, 1.0), (offloaded, 3.0))


def test_the_step_on_the_host_is_advised_only_if_it_fits_there():
    args = [*H100, "strategy=full_shard", "train.micro_batch_size=1", "train.global_batch_size=8"]
    args += ["cluster.memory=32GiB"]

    def offloads(*more: str) -> list[str]:
        suggestions = suggest(Estimator(), resolved(*args, *more), more_ranks=False)
        return [" ".join(change.settings) for change, _ in suggestions]

    result = offloads()
    assert not result[0].startswith("strategy.offload=")
    assert any(each.startswith("strategy.offload=") for each in result)
    assert not any("offload" in each for each in offloads("cluster.host_memory=16GiB"))


@pytest.mark.slow
@matrix(model=["llama3_1b", "llama3_8b"], cluster=["8xh100", "2xa100_80", "l4", "mi300x"])
def test_quantized_weights_are_never_predicted_faster(model, cluster):
    estimator = Estimator()
    args = [f"model={model}", f"cluster={cluster}", "model.lora.rank=16", "train.seq_len=2048"]
    args += ["activation_checkpointing=full", "train.global_batch_size=16"]
    bf16, int8, nf4 = (
        estimator.predict(resolved(*args, f"model.base_dtype={dtype}")).seconds
        for dtype in ("auto", "int8", "nf4")
    )
    assert bf16 < int8 <= nf4 < 2 * bf16


def test_kept_logits_take_one_more_copy_in_float32():
    args = ("model=llama_tiny", "cluster=1xh100", "model.vocab_size=32768", "train.seq_len=2048",
             "train.micro_batch_size=4")  # fmt: skip
    logits = 4 * 2048 * 32768
    whole = estimated(*args, "train.loss_chunk_tokens=0").step.breakdown["logits_and_loss"]
    kept_logits = estimated(*args, "engine.program=torchtitan").step.breakdown["logits_and_loss"]
    assert kept_logits - whole == 4 * logits


def test_blocks_that_free_one_anothers_tensors_are_a_line(tmp_path, monkeypatch):
    def fail(*args: object, **options: object) -> None:
        raise UnevenStepError

    save_decoder("qwen3_moe", tmp_path)
    plan = resolved("model=hf", f"model.path={tmp_path}", "cluster=1xh100", "train.seq_len=16")
    monkeypatch.setattr("fsdpctl.estimate.estimator.estimate_steps", fail)
    with pytest.raises(UsageError, match="qwen3_moe: memory cannot be estimated with this recomp"):
        Estimator().estimate(plan)
