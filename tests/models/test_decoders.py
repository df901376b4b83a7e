"""Decoders of transformers under `model=transformers`, beside transformers itself."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto import modeling_auto

from benchmarks.decoders import fill
from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.load import check_weights, load_weights
from fsdpctl.checkpoint.manifest import Progress
from fsdpctl.checkpoint.pretrained import assets_beside, open_weights
from fsdpctl.checkpoint.publish import About
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.comm.collectives import collectives_for
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model_path import option_of
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_words
from fsdpctl.engine.model import ShardedModel
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.estimate.trace import trace
from fsdpctl.models.experts import global_balance
from fsdpctl.models.registry import build_model, count_active, initialize_parameter
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.layout import Span
from fsdpctl.resolve.attention import check_attention
from fsdpctl.resolve.decoder_check import check_decoder, with_packing
from fsdpctl.train.assemble import make_model, make_module
from fsdpctl.train.generate import Sampling, generate
from tests.distributed import distributed
from tests.engine.test_parity import largest_difference
from tests.models.decoders import (
    LENGTH,
    batches_of,
    load_decoder,
    our_loss,
    save_decoder,
    their_loss,
)
from tests.reference import train_reference

CPU = torch.device("cpu")
STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer"]
SOME = ["qwen3_moe"]
ROOT = Path(__file__).parent.parent.parent
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "decoders.json").read_text())["results"]


class Counted(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def compose(folder: Path, *words: str) -> Config:
    fixed = ["model=transformers", f"model.path={folder}", "precision=fp32"]
    return compose_config([*fixed, *words]).config


def load(config: Config, strategy: str = "full_shard") -> ShardedModel:
    model = make_model(config, CPU, strategy=strategy, empty=True)
    load_weights(open_weights(config.model), model)
    return model


def trains_as_transformers(rank: int, world_size: int, folder: Path, family: str) -> None:
    if rank == 0:
        save_decoder(family, folder)
    collectives_for(CPU).barrier()
    batches = batches_of(3, world_size)
    theirs = load_decoder(folder)
    losses = [their_loss(theirs, of[rank][0]).item() for of in batches[:1]]
    names = {name for name, _ in theirs.named_parameters()}
    expected = train_reference(theirs, their_loss, batches, lr=1e-3)
    for strategy in STRATEGIES:
        model = load(compose(folder), strategy)
        optimizer = ShardedAdamW(model, lr=1e-3)
        found = []
        for of_ranks in batches:
            loss = our_loss(model, of_ranks[rank][0])
            found.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert found[0] == pytest.approx(losses[0], abs=1e-6), strategy
        trained = model.state_dict()
        ours, wanted = ({n: state[n] for n in names} for state in (trained, expected))
        print(strategy, largest_difference(ours, wanted))
        assert largest_difference(ours, wanted) <= 1e-5, strategy


@pytest.mark.parametrize("family", SOME)
@distributed(world_size=2)
def test_trains_as_transformers(rank: int, world_size: int, family: str, tmp_path: Path) -> None:
    trains_as_transformers(rank, world_size, tmp_path / "in", family)


SUPPORTED = [each["family"] for each in RESULTS if each["is_tried"] and not each["problem"]]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", SUPPORTED)
@distributed(timeout=240)
def test_families_train_as_transformers(
    rank: int, world_size: int, family: str, tmp_path: Path
) -> None:
    trains_as_transformers(rank, world_size, tmp_path / "in", family)


@pytest.mark.slow
def test_the_results_are_those_of_the_installed_transformers():
    """The table in docs/models.md is made of them."""
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {each["family"] for each in RESULTS} == set(known)
    for each in RESULTS:
        if each["is_tried"] and not each["problem"]:
            assert each["loss_difference"] <= 1e-5, each
            assert each["gradient_difference"] <= 1e-5, each
            assert each["exports_equal"], each


# ---- weights -----------------------------------------------------------------------------


def test_each_expert_is_read_by_range(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    weights = open_weights(compose(tmp_path).model)
    theirs = dict(load_decoder(tmp_path).named_parameters())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    flat = theirs[name].detach().flatten()
    for start, stop in ((0, len(flat)), (100, 700), (511, 513), (1023, 1025), (5, 6)):
        read = b"".join(bytes(d) for _, d in weights.read(f"param/{name}", Span(start, stop)))
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
    save_file({**tensors, "stray": missing}, file)
    with pytest.raises((CheckpointError, UsageError)):
        check_weights(open_weights(config.model), build_model(config.model))


def test_export_has_the_names_of_the_hub(tmp_path):
    save_decoder("qwen3_moe", tmp_path / "in")
    config = compose(tmp_path / "in")
    model = load(config)
    about = About(Progress(1), config_words(config), assets_beside(tmp_path / "in"))
    folder = tmp_path / "step-00000001"
    write_checkpoint(folder, take_snapshot(model, None, 0, about), model.collectives)
    consolidate(CheckpointReader(folder), tmp_path / "out")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = batches_of(1, 1)[0][0][0]
    logits = [load_decoder(tmp_path / each)(tokens).logits for each in ("in", "out")]
    assert torch.equal(*logits)
    again = compose_config(["model=transformers", f"model.path={folder}"]).config.model
    assert again.config_json == config.model.config_json


# ---- experts -----------------------------------------------------------------------------


def experts(folder: Path, *words: str) -> TransformersDecoder:
    """A model with experts and its weights, without an engine."""
    config = compose(folder, *words)
    module = make_module(config)
    assert isinstance(module, TransformersDecoder)
    fill(module, open_weights(config.model))
    return module


@pytest.mark.parametrize("recomputes", ["none", "selective", "full"])
def test_the_auxiliary_loss_is_that_of_transformers(recomputes, tmp_path):
    save_decoder("qwen3_moe", tmp_path, output_router_logits=True, router_aux_loss_coef=0.5)
    module = experts(tmp_path, f"activation_checkpointing={recomputes}")
    tokens = batches_of(1, 1)[0][0][0]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    theirs = load_decoder(tmp_path)
    out = theirs(input_ids=inputs, use_cache=False, output_router_logits=True)
    wanted = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()) + 0.5 * out.aux_loss
    loss = module(inputs, targets, 9) / targets.numel()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    loss.backward()
    wanted.backward()
    for name, param in theirs.named_parameters():
        torch.testing.assert_close(
            module.get_parameter(name).grad, param.grad, rtol=1e-4, atol=1e-6
        )


def test_the_auxiliary_loss_can_be_left_out(tmp_path):
    save_decoder("qwen3_moe", tmp_path, output_router_logits=True, router_aux_loss_coef=0.5)
    tokens = batches_of(1, 1)[0][0][0]
    losses = {}
    for kind in ("model", "global", "none"):
        module = experts(tmp_path, f"model.router_aux_loss={kind}")
        losses[kind] = module(tokens[:, :-1], tokens[:, 1:]).item()
        assert module.balances_experts == (kind != "none")
    assert losses["model"] == pytest.approx(losses["global"], rel=1e-6)
    assert losses["model"] > losses["none"] + 1


@distributed(world_size=2)
def test_global_balance_counts_the_tokens_of_all_ranks(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(10, 4, generator=generator) for _ in range(world_size)]
    config = SimpleNamespace(num_experts_per_tok=2)
    reduce = collectives_for(CPU).all_reduce
    found = global_balance([logits[rank]], config, reduce)
    everywhere = torch.cat(logits)
    chosen = everywhere.softmax(-1).topk(2).indices
    share = F.one_hot(chosen, 4).sum(dim=(0, 1)) / len(everywhere)
    mean = logits[rank].softmax(-1).mean(0)
    assert float(found) == pytest.approx(float(4 * (share * mean).sum()), rel=1e-6)


def test_the_choice_of_experts_is_not_recomputed(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    tokens = batches_of(1, 1)[0][0][0]
    counts = {}
    for recomputes in ("none", "full"):
        module = experts(tmp_path, f"activation_checkpointing={recomputes}")
        with Counted() as counted:
            module(tokens[:, :-1], tokens[:, 1:]).backward()
        counts[recomputes] = counted.calls["aten::topk"], counted.calls["aten::mm"]
    assert counts["full"][0] == counts["none"][0] > 0
    assert counts["full"][1] > counts["none"][1]


@distributed(world_size=2)
def test_experts_without_tokens_have_zero_gradients(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Equal tokens are sent to the same experts: on a rank, and then on all of them."""
    folder = tmp_path / "in"
    if rank == 0:
        save_decoder("qwen3_moe", folder)
    collectives_for(CPU).barrier()
    for tokens in ([3, 7], [5, 5]):
        batches = [[[torch.full((2, 9), token)] for token in tokens] for _ in range(2)]
        theirs = load_decoder(folder)
        chosen = theirs(batches[0][rank][0], output_router_logits=True, use_cache=False)
        used = {int(e) for each in chosen.router_logits for e in each.topk(2).indices.flatten()}
        assert len({*used}) < 4 or len(chosen.router_logits) > 1
        expected = train_reference(theirs, their_loss, batches, lr=1e-3)
        model = load(compose(folder))
        optimizer = ShardedAdamW(model, lr=1e-3)
        for of_ranks in batches:
            our_loss(model, of_ranks[rank][0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = model.state_dict()
        names = [name for name, _ in theirs.named_parameters()]
        ours, wanted = ({n: state[n] for n in names} for state in (trained, expected))
        assert largest_difference(ours, wanted) <= 1e-6


def test_what_a_token_uses_of_experts_is_counted(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    config = compose(tmp_path)
    module = build_model(config.model)
    idle = sum(p.numel() for n, p in module.named_parameters() if "experts" in n) // 2
    assert count_active(module) == sum(p.numel() for p in module.parameters()) - idle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_traced_in_any_dtype(dtype, tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    module = build_model(compose(tmp_path).model).to(dtype)
    tokens = torch.empty(2, LENGTH, dtype=torch.int64, device="meta")

    def run() -> Tensor:
        loss: Tensor = module(tokens, tokens)
        loss.backward()
        return loss

    passed = trace(module, [], run, "cpu", None)
    work = [each for of in passed.work.values() for each in of if "grouped" in each.name]
    rows = 2 * LENGTH * 2  # two experts for each token
    layer = sum(
        2 * rows * p[0].numel() for n, p in module.named_parameters() if "0.mlp.experts" in n
    )
    blocks = sum("experts.down_proj" in name for name, _ in module.named_parameters())
    assert sum(each.flops for each in work) == 3 * blocks * layer
    assert len(work) == 6 * blocks


# ---- checks at the start -----------------------------------------------------------------


@pytest.mark.parametrize(("family", "packs"), [("qwen3_moe", True), ("bloom", False)])
def test_the_start_sees_whether_documents_may_share_a_sequence(family, packs, tmp_path):
    save_decoder(family, tmp_path)
    assert check_decoder(compose(tmp_path).model) is packs
    chats = compose(tmp_path, "data=chat", "data.path=x.jsonl")
    config, notes = with_packing(chats)
    assert config.data.packing is (None if packs else False)
    assert len(notes) == (not packs)
    if not packs:
        with pytest.raises(UsageError, match="data.packing=true: bloom mixes"):
            with_packing(compose(tmp_path, "data=chat", "data.path=x", "data.packing=true"))


def test_a_model_that_sees_later_tokens_is_rejected(tmp_path):
    save_decoder("electra", tmp_path)
    with pytest.raises(UsageError, match="not causal; tokens see later ones"):
        check_decoder(compose(tmp_path).model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen3_mo"}, "did you mean qwen3_moe"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}, "runs no code from"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: not supported"),
        ({"model_type": "gemma3"}, "is not a text decoder"),
        ({"num_attention_heads": "many"}, "rejects it"),
    ],
)
def test_a_config_that_transformers_cannot_run_is_rejected(changes, said, tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UsageError, match=said) as caught:
        compose(tmp_path)
    assert "\n" not in str(caught.value)


def test_sizes_are_those_of_the_config(tmp_path):
    save_decoder("qwen3_moe", tmp_path)
    with pytest.raises(UsageError, match="model.num_layers=9: conflicts"):
        compose(tmp_path, "model.num_layers=9")
    with pytest.raises(UsageError, match="model.attention=flash: not supported by model=transfo"):
        check_attention(compose(tmp_path, "model.attention=flash", "launch.device=cpu"))


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
    assert float(drawn["model.layers.0.mlp.experts.down_proj"][0].std()) == pytest.approx(
        0.02, rel=0.1
    )
    assert torch.equal(drawn["model.norm.weight"][0], torch.ones(32))


# ---- our own module beside that of transformers ------------------------------------------


def test_own_and_transformers_modules_agree(tmp_path):
    save_decoder("llama", tmp_path)
    tokens = batches_of(1, 1)[0][0][0]
    losses, checkpoints = {}, {}
    for option in ("hf", "transformers"):
        words = [f"model={option}", f"model.path={tmp_path}", "precision=fp32"]
        config = compose_config(words).config
        model = load(config)
        losses[option] = our_loss(model, tokens).item()
        about = About(Progress(1), config_words(config), assets_beside(tmp_path))
        folder = tmp_path / option
        write_checkpoint(folder, take_snapshot(model, None, 0, about), model.collectives)
        checkpoints[option] = folder
    assert losses["hf"] == pytest.approx(losses["transformers"], abs=1e-6)
    for option, other in (("hf", "transformers"), ("transformers", "hf")):
        words = [f"model={option}", f"model.path={checkpoints[other]}", "precision=fp32"]
        model = load(compose_config(words).config)
        assert our_loss(model, tokens).item() == losses[option]
        assert option_of(str(checkpoints[other])) == other


def test_cached_generation_equals_running_all_tokens(tmp_path):
    for family in ("qwen3_moe", "gemma2", "mamba"):
        save_decoder(family, tmp_path / family)
        module = experts(tmp_path / family)
        texts = [
            generate(
                module,
                [1, 2, 3],
                range(8),
                context=32,
                sampling=Sampling(0, temperature=0),
                device=CPU,
                caches=caches,
            )
            for caches in (True, False)
        ]
        assert texts[0] == texts[1]
