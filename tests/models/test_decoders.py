"""Decoders of transformers under `model=hf`, compared with transformers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.initial_weights import initial_weights
from fsdpctl.checkpoint.load import check_weights, load_weights
from fsdpctl.checkpoint.manifest import PARAMETER, tensor_key
from fsdpctl.checkpoint.peft import write_peft
from fsdpctl.checkpoint.pretrained import open_weights, read_model_assets
from fsdpctl.comm.mesh import collectives_for
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.models.build_model import build_model, initialize_parameter
from fsdpctl.models.decoder_check import adapt_to_decoder
from fsdpctl.models.transformers_build import fuse_norms
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.layout import Span
from fsdpctl.resolve.attention_kernel import check_attention
from fsdpctl.training.assemble import make_model, make_optimizer
from fsdpctl.training.callbacks.generation import Sampling, generate
from tests.distributed import distributed
from tests.engine.models import one_step
from tests.engine.test_parity import largest_difference
from tests.matrix import fast
from tests.models.decoders import (
    CPU,
    batches_of,
    compose,
    exact_loss,
    load,
    load_decoder,
    our_loss,
    plain_module,
    save_decoder,
    saved,
    their_loss,
)
from tests.reference import PaddedAdamW, train_reference

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer"]
SOME = ["qwen3_moe"]
# transformers applies their sinks in float32; AdamW amplifies the rounding errors.
SHARES_IN_FLOAT32 = {"granite_swa", "granitemoe_swa"}
EPS = 1e-6  # with 1e-8, AdamW multiplies the rounding error of a gradient of 1e-9 by 1e6
ROOT = Path(__file__).parent.parent.parent
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "decoders.json").read_text())["results"]


def trains_as_transformers(
    rank: int, world_size: int, folder: Path, family: str, strategies: list[str]
) -> None:
    """Compare a run's loss in float32, and three steps in float64, with transformers.

    In float32, AdamW turns rounding errors of zero gradients, such as those of the keys' biases,
    into steps. Grouped matrix products do not support float64.
    """
    if rank == 0:
        save_decoder(family, folder)
    collectives_for(CPU).barrier()
    batches = batches_of(3, world_size)
    wanted = their_loss(load_decoder(folder), batches[0][rank][0]).item()
    theirs = load_decoder(folder, experts_implementation="eager").double()
    fuse_norms(theirs)  # transformers' norms round to float32
    names = [name for name, _ in theirs.named_parameters()]
    make_optimizer = partial(PaddedAdamW, eps=EPS)
    expected = train_reference(theirs, exact_loss, batches, make_optimizer=make_optimizer)
    config, _ = adapt_to_decoder(compose(folder))
    for strategy in strategies:
        model = load(config, strategy)
        model.train(False)  # without dropout, as the reference
        loss = our_loss(model, batches[0][rank][0]).item()
        assert loss == pytest.approx(wanted, rel=1e-6), strategy
        module = plain_module(folder).double().train(False)
        module.transformers_model.set_experts_implementation("eager")
        model = shard_model(module, strategy)
        optimizer = ShardedAdamW(model, lr=1e-2, eps=EPS)
        for of_ranks in batches:
            one_step(model, optimizer, of_ranks[rank][0], exact_loss)
        trained = model.state_dict()
        ours, others = ({n: state[n] for n in names} for state in (trained, expected))
        allowed = 1e-4 if family in SHARES_IN_FLOAT32 else 1e-12
        assert largest_difference(ours, others) <= allowed, strategy


@pytest.mark.parametrize("family", SOME)
@distributed(world_size=2)
def test_trains_as_transformers(rank: int, world_size: int, family: str, tmp_path: Path) -> None:
    trains_as_transformers(rank, world_size, tmp_path / "in", family, STRATEGIES[:1])


# transformers' mask of xglm does not support float64.
SUPPORTED = [
    x["family"] for x in RESULTS if x["is_tried"] and not x["problem"] and x["family"] != "xglm"
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", SUPPORTED)
@distributed(timeout=240)
def test_families_train_as_transformers(rank, world_size, family, tmp_path):
    trains_as_transformers(rank, world_size, tmp_path / "in", family, STRATEGIES)


@pytest.mark.slow
def test_the_results_are_those_of_the_installed_transformers():
    """The table in docs/models.md shows these results."""
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {each["family"] for each in RESULTS} == set(known)
    for each in RESULTS:
        if each["is_tried"] and not each["problem"]:
            assert each["loss_difference"] <= 1e-5, each
            assert each["gradient_difference"] <= 1e-5, each
            assert each["exports_equal"], each
            assert not each.get("failed"), each


def test_each_expert_is_read_by_range(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    weights = open_weights(compose(tmp_path).model)
    theirs = dict(load_decoder(tmp_path).named_parameters())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    flat = theirs[name].detach().flatten()
    for start, stop in ((0, len(flat)), (100, 700), (511, 513), (1023, 1025), (5, 6)):
        parts = weights.read(tensor_key(PARAMETER, name), Span(start, stop))
        read = b"".join(bytes(data) for _, data in parts)
        assert torch.equal(torch.frombuffer(bytearray(read), dtype=torch.float32), flat[start:stop])


def test_a_missing_expert_is_named(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    missing = tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    save_file(tensors, file)
    config = compose(tmp_path)
    with pytest.raises((CheckpointError, UsageError), match="gate_up_proj"):
        check_weights(open_weights(config.model), build_model(config.model))
    save_file({**tensors, "model.layers.1.mlp.experts.2.up_proj.weight": missing[:4]}, file)
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        check_weights(open_weights(config.model), build_model(config.model))
    renamed = {name.replace("experts.2.", "experts.9."): each for name, each in tensors.items()}
    save_file({**renamed, "model.layers.1.mlp.experts.9.up_proj.weight": missing}, file)
    with pytest.raises(CheckpointError, match="numbered from 0"):
        open_weights(config.model)
    save_file({**tensors, "stray": missing}, file)
    with pytest.raises((CheckpointError, UsageError)):
        check_weights(open_weights(config.model), build_model(config.model))


def test_export_has_the_names_of_the_hub(tmp_path):
    save_decoder("qwen3_moe", tmp_path / "in")
    config = compose(tmp_path / "in")
    model = load(config)
    folder = tmp_path / "step-00000001"
    consolidate(saved(model, config, folder, read_model_assets(tmp_path / "in")), tmp_path / "out")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = batches_of(1, 1)[0][0][0]
    assert torch.equal(*[load_decoder(tmp_path / each)(tokens).logits for each in ("in", "out")])
    again = compose_config(["model=hf", f"model.path={folder}"]).config.model
    assert again.config_json == config.model.config_json


@pytest.mark.parametrize(("changes", "error"), [
    ({"model_type": "qwen3_mo"}, "qwen3_mo: not a causal decoder .*; did you mean qwen3_moe"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "config.json: .*longrope.*transformers"),
    ({"num_hidden_layers": "many"}, "num_hidden_layers many: expected a whole number"),
    ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}, "runs no code from"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: not supported"),
    ({"model_type": "gemma3"}, "is not a text decoder"),
    ({"num_attention_heads": "many"}, "num_attention_heads many: expected a whole number"),
])  # fmt: skip
def test_a_config_that_transformers_cannot_run_is_rejected(changes, error, tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UsageError, match=error) as caught:
        compose(tmp_path)
    assert "\n" not in str(caught.value)


def test_kernels_that_a_config_names_are_not_loaded(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    before = compose(tmp_path).model
    file = tmp_path / "config.json"
    named = {"_attn_implementation": "some/kernel", "experts_implementation": "some/kernel"}
    file.write_text(json.dumps(json.loads(file.read_text()) | named | {"auto_map": {"a": "b.C"}}))
    assert compose(tmp_path).model == before


def test_kernels_are_checked_by_the_sizes_of_the_config(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    for kernel in ("flash", "transformers"):
        check_attention(compose(tmp_path, f"model.attention={kernel}", "launch.device=cpu"))


def test_initial_weights_depend_on_seed_and_name_alone(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    config = compose(tmp_path, "model.init=random").model
    drawn = {}
    for name, shape in (
        ("model.layers.0.mlp.experts.down_proj", (4, 32, 16)),
        ("model.layers.0.mlp.gate.weight", (4, 32)),
        ("model.norm.weight", (32,)),
    ):
        values = [torch.empty(shape) for _ in range(3)]
        for each, seed in zip(values, (1, 1, 2), strict=True):
            initialize_parameter(name, each, seed=seed, config=config)
        assert torch.equal(values[0], values[1])
        drawn[name] = values
    assert not torch.equal(*drawn["model.layers.0.mlp.experts.down_proj"][1:])
    std = float(drawn["model.layers.0.mlp.experts.down_proj"][0].std())
    assert std == pytest.approx(0.02, rel=0.1)
    assert torch.equal(drawn["model.norm.weight"][0], torch.ones(32))


@pytest.mark.parametrize(
    "family", fast("qwen3_moe", slow=["gemma2", "gpt_oss", "mamba", "qwen3_next"])
)
def test_cached_generation_equals_running_all_tokens(family, tmp_path):
    save_decoder(family, tmp_path)
    module = plain_module(tmp_path)
    options: dict[str, Any] = {"context": 32, "sampling": Sampling(0, temperature=0), "device": CPU}
    tokens = partial(generate, module, [1, 2, 3], range(8), **options)
    assert [*tokens(use_cache=True)] == [*tokens(use_cache=False)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_those_of_peft(tmp_path):
    """Merged adapters, and exported adapters in PEFT, compute what the model computes."""
    peft: Any = pytest.importorskip("peft")
    save_decoder("qwen3_moe", tmp_path / "in")
    config = compose(tmp_path / "in", "model.lora.rank=2", "optimizer.lr=1e-2")
    model = make_model(config, CPU, empty=True)
    load_weights(initial_weights(config.model, model.module, 0, open_weights(config.model)), model)
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert all(".lora_" in name and "expert" not in name for name in names)
    optimizer = make_optimizer(config, model)
    for ((batch,),) in batches_of(3, 1):
        one_step(model, optimizer, batch, our_loss)
    reader = saved(model, config, tmp_path / "step-00000001", read_model_assets(tmp_path / "in"))
    consolidate(reader, tmp_path / "merged", merge=True)
    write_peft(reader, tmp_path / "adapters")
    tokens = batches_of(1, 1, seed=9)[0][0][0]
    ours = model(tokens)
    merged = load_decoder(tmp_path / "merged")(tokens).logits
    adapted = peft.PeftModel.from_pretrained(load_decoder(tmp_path / "in"), tmp_path / "adapters")
    assert (ours - load_decoder(tmp_path / "in")(tokens).logits).abs().max() > 1e-3
    torch.testing.assert_close(ours, merged, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, adapted(tokens).logits, rtol=0, atol=1e-5)
