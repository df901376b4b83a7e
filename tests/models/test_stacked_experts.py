"""Experts with packed matrices and adapters: those of PEFT, on any number of ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.initial_weights import initial_weights
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.peft import write_peft
from fsdpctl.comm.mesh import collectives_for
from fsdpctl.config.peft import ADAPTER_CONFIG, adapter_settings
from fsdpctl.config.schema import Resolved
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import UsageError
from fsdpctl.models.build_model import build_model, count_active_parameters
from fsdpctl.models.quantized import NF4, quant_format_of, quantized_shapes
from fsdpctl.models.stacked_experts import StackedExperts
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.run.step_metrics import model_flops
from fsdpctl.training.assemble import make_model
from tests.distributed import distributed
from tests.matrix import fast
from tests.models.decoders import (
    CPU,
    batches_of,
    compose,
    load_decoder,
    our_loss,
    save_decoder,
    saved,
    their_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LAYER = "o_proj"
MATRICES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def loaded(config: Resolved, strategy: str = "no_shard") -> ShardedModel:
    model = make_model(config, CPU, strategy=strategy, empty=True)
    load_weights(initial_weights(config.model, build_model(config.model), 0), model)
    return model


def write_adapters(base: Path, folder: Path, layer: str, matrices: list[str]) -> None:
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = peft.LoraConfig(
        r=8, lora_alpha=12, target_modules=[layer], target_parameters=matrices,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(load_decoder(base), options)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.add_(torch.randn_like(param), alpha=0.05)
    model.save_pretrained(folder)


def gradients(model: ShardedModel) -> list[Tensor]:
    """Return the norms of the gradients of all adapters."""
    results = []
    for shard in model.flat_shards():
        for placement in shard.layout.param_spans if shard.trainable else ():
            assert shard.grad is not None
            results.append(shard.grad[placement.span.start : placement.span.stop].norm())
    return results


@pytest.mark.parametrize("case", fast(
    ("qwen3_moe", "nf4", MATRICES), ("gpt_oss", "int8", MATRICES),
    slow=[*((family, "nf4", MATRICES) for family in ("gpt_oss", "mixtral", "deepseek_v3")),
     ("qwen3_moe", "auto", MATRICES[1:]), ("gpt_oss", "auto", MATRICES[:1])],
))  # fmt: skip
def test_adapters_of_packed_experts_are_those_of_peft(tmp_path, case):
    """Compare logits and gradients with PEFT on the dequantized base, exported and merged too."""
    import peft

    family, packing, matrices = case
    save_decoder(family, tmp_path / "in", hidden_size=64)
    base_dtype = f"model.base_dtype={packing}"
    packed = compose(tmp_path / "in", "model.lora.rank=8", base_dtype)
    consolidate(saved(loaded(packed), packed, tmp_path / "first"), tmp_path / "base", merge=True)
    write_adapters(tmp_path / "base", tmp_path / "adapters", LAYER, matrices)
    base = load_decoder(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True)
    config = compose(tmp_path / "in", f"model.lora.path={tmp_path / 'adapters'}", base_dtype)
    model = loaded(config)
    if packing != "auto":
        assert sum("experts" in name for name in quantized_shapes(model.module)) >= 2
    batch = batches_of(1, 1)[0][0][0]
    expected = theirs(batch, use_cache=False).logits.detach()
    assert (model(batch) - expected).abs().max() <= 1e-5
    our_loss(model, batch).backward()
    ours = gradients(model)
    their_loss(theirs, batch).backward()
    named = (param.grad for name, param in theirs.named_parameters() if "lora_" in name)
    wanted = [grad.norm() for grad in named if grad is not None]
    assert len(ours) == len(wanted) > 0
    assert torch.stack(ours).sort()[0] == pytest.approx(torch.stack(wanted).sort()[0], abs=1e-5)
    reader = saved(model, config, tmp_path / "step")
    consolidate(reader, tmp_path / "merged", merge=True)
    assert (load_decoder(tmp_path / "merged")(batch).logits - expected).abs().max() <= 1e-5
    write_peft(reader, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(load_decoder(tmp_path / "base"), tmp_path / "again")
    assert torch.equal(again(batch, use_cache=False).logits, theirs(batch, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", fast(2, slow=[3]))
@distributed()
def test_ranks_train_what_one_process_trains(rank: int, world_size: int, tmp_path: Path) -> None:
    """Equal tokens are routed to the same experts: first on each rank, then on all ranks."""
    folder = tmp_path / "in"
    if rank == 0:
        save_decoder("qwen3_moe", folder, hidden_size=64)
    collectives_for(CPU).barrier()
    args = ["model.lora.rank=8", "model.lora.targets=experts", "model.base_dtype=nf4"]
    config = compose(folder, *args)
    drawn = [each[0] for each in batches_of(1, world_size)[0]]
    equal = [torch.full((2, 9), token) for token in (3, 7, 9)[:world_size]]
    for batches in (drawn, equal, equal[:1] * world_size):
        states = []
        for name in ("no_shard", "full_shard"):
            model = loaded(config, name)
            optimizer = ShardedSGD(model, lr=1.0, momentum=0.0)
            alone = name == "no_shard"
            for batch in batches if alone else batches[rank : rank + 1]:
                with model.no_sync():
                    (our_loss(model, batch) / (len(batches) if alone else 1)).backward()
            model.sync_gradients()
            optimizer.step()
            states.append(model.state_dict())
        assert states[0].keys() == states[1].keys()
        for name, values in states[0].items():
            assert torch.allclose(values.float(), states[1][name].float(), atol=1e-6), name


@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_are_multiplied_by_the_experts_that_they_use(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(8, 128, 256, generator=generator)
    packed = NF4.quantize(weights)
    exact = NF4.dequantize(packed, weights.shape, torch.float32)
    x = torch.randn(5, 128 if transposed else 256, generator=generator)
    numbers = torch.tensor([1, 1, 4, 6, 7])
    ends = torch.bincount(numbers, minlength=8).cumsum(0).to(torch.int32)
    result = torch.ops.fsdpctl.quantized_experts(x, packed, ends, [8, 128, 256], transposed, "nf4")
    expected = [
        row @ (exact[number] if transposed else exact[number].T)
        for row, number in zip(x, numbers.tolist(), strict=True)
    ]
    torch.testing.assert_close(result, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_what_a_token_uses_of_packed_and_adapted_experts_is_counted(tmp_path: Path) -> None:
    save_decoder("qwen3_moe", tmp_path, hidden_size=64)
    plain = build_model(compose(tmp_path).model)
    args = ["model.lora.rank=8", "model.lora.targets=experts", "model.base_dtype=nf4"]
    config = compose(tmp_path, *args, "train.seq_len=16")
    module = build_model(config.model)
    assert quant_format_of(module) is NF4
    adapters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert all("experts" in n for n, p in module.named_parameters() if p.requires_grad)
    assert count_active_parameters(module) == count_active_parameters(plain) + adapters // 2
    assert model_flops(config, module, CPU, 1).per_token > 4 * count_active_parameters(plain) // 2


@pytest.mark.parametrize(("args", "message"), [
    ("experts model.lora.rank=4", "rank=4: expected a multiple of 8 for adapters of experts"),
    ("experts model.lora.dropout=0.1", "dropout=0.1: not supported with adapters of experts"),
    ("expert.down_proj,experts", "expert.down_proj matches no linear layer"),
])  # fmt: skip
def test_settings_that_adapters_of_experts_do_not_support_are_rejected(tmp_path, args, message):
    save_decoder("qwen3_moe", tmp_path)
    options = {"model.lora.rank": "8", **dict(each.split("=") for each in args.split()[1:])}
    settings = [f"{name}={value}" for name, value in options.items()]
    with pytest.raises(UsageError, match=message):
        build_model(compose(tmp_path, f"model.lora.targets={args.split()[0]}", *settings).model)


def test_blocks_that_two_experts_would_share_are_rejected(tmp_path: Path) -> None:
    save_decoder("qwen3_moe", tmp_path, hidden_size=36, moe_intermediate_size=9)
    with pytest.raises(UsageError, match="weights per expert, not a multiple of 64"):
        build_model(compose(tmp_path, "model.lora.rank=8", "model.base_dtype=nf4").model)


def test_layers_called_like_matrices_of_experts_leave_experts_as_they_are(tmp_path: Path) -> None:
    save_decoder("deepseek_v3", tmp_path)
    args = ("model.lora.rank=8", "model.lora.targets=down_proj")
    module = build_model(compose(tmp_path, *args).model)
    assert not any(isinstance(each, StackedExperts) for each in module.modules())


@pytest.mark.parametrize("targets", fast("[all_linear,experts]", slow=["[down_proj,o_proj]"]))
def test_layers_called_like_matrices_of_experts_open_in_peft(tmp_path: Path, targets: str) -> None:
    """PEFT treats such layers as experts in families that transformers converts."""
    peft: Any = pytest.importorskip("peft")
    save_decoder("deepseek_v3", tmp_path / "in")
    config = compose(tmp_path / "in", "model.lora.rank=8", f"model.lora.targets={targets}")
    model = loaded(config)
    with torch.no_grad():
        for shard in model.flat_shards():
            if shard.trainable:
                shard.master.add_(torch.randn_like(shard.master), alpha=0.05)
    model.broadcast_updated_params()
    batch = batches_of(1, 1)[0][0][0]
    expected = model(batch)
    assert (load_decoder(tmp_path / "in")(batch).logits - expected).abs().max() > 1e-3
    write_peft(saved(model, config, tmp_path / "step"), tmp_path / "adapters")
    theirs = peft.PeftModel.from_pretrained(load_decoder(tmp_path / "in"), tmp_path / "adapters")
    assert (theirs(batch, use_cache=False).logits - expected).abs().max() <= 1e-5
    again = compose(tmp_path / "in", f"model.lora.path={tmp_path / 'adapters'}")
    assert (loaded(again)(batch) - expected).abs().max() <= 1e-6


def test_only_parts_that_name_experts_select_their_matrices(tmp_path: Path) -> None:
    save_decoder("deepseek_v3", tmp_path)

    def chosen(targets: str) -> set[str]:
        config = compose(tmp_path, "model.lora.rank=8", f"model.lora.targets={targets}")
        results = (name for name, _ in build_model(config.model).named_parameters())
        return {each.split(".")[-3] for each in results if ".expert_adapters." in each}

    assert chosen("[shared_experts.gate_proj,down_proj]") == set()
    assert chosen("[down_proj,mlp.experts.gate_up_proj]") == {"gate_up_proj"}
    assert chosen(r"o_proj|experts\.down_proj") == {"down_proj"}
    assert chosen("[experts,o_proj]") == chosen("experts") == {"gate_up_proj", "down_proj"}


def test_names_of_peft_are_matrices_of_experts_or_layers(tmp_path: Path) -> None:
    options = {
        "peft_type": "LORA", "target_modules": ["q_proj"],
        "target_parameters": ["down_proj", "mlp.experts.gate_up_proj", "mlp.up_proj.weight"],
    }  # fmt: skip
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(options))
    targets = re.compile(adapter_settings(str(tmp_path))["model.lora.targets"])
    for name in (
        "a.q_proj",
        "mlp.experts.down_proj",
        "a.mlp.experts.gate_up_proj",
        "a.mlp.up_proj",
    ):
        assert targets.search(name), name
    assert not targets.search("mlp.down_proj")
