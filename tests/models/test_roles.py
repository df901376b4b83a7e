"""The roles of parameters, and the matrices in fused ones, are what the forward does with them."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdpctl.engine.describe import divide_module
from fsdpctl.models.fused import fused_parameters
from fsdpctl.models.products import is_transposed, read_elsewhere
from fsdpctl.models.roles import describe_parameters
from fsdpctl.plan.layout import Fused, decay_group
from fsdpctl.plan.muon import is_muons
from tests.models.tiny import TASKS, batch_of, make_tiny

_CUTS = ("split", "chunk", "tensor_split", "unbind", "__getitem__", "split_with_sizes")
_VIEWS = ("view", "reshape", "transpose", "permute", "unsqueeze", "contiguous", "flatten")
_FEW = ["codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mamba", "phi3", "qwen3_next"]
# Layers that another function comes before the cut of, or whose parts are cut once more.
_NOT_SEEN = ("experts", "input_linear", "in_proj_qkv", "audio_embed", "minimax", "nemotron_h")


class Cuts(TorchFunctionMode):
    """Records the rows in each part of the results of layers, which have their numbers instead."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts: dict[str, list[set[int]]] = {name: [] for name in layers}
        self._from: dict[int, tuple[str, Tensor]] = {}
        for name, layer in layers.items():
            layer.register_forward_hook(lambda *about, name=name: self._numbered(name, about[2]))

    def _numbered(self, name: str, out: Tensor) -> Tensor:
        numbers = torch.arange(out.shape[-1], dtype=out.dtype).expand(out.shape).clone()
        self._from[id(numbers)] = name, numbers
        return numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        word, source = getattr(func, "__name__", ""), self._from.get(id(args[0])) if args else None
        if source is not None and word in (*_CUTS, *_VIEWS):
            for each in result if isinstance(result, tuple | list) else [result]:
                self._from[id(each)] = source[0], each
                if word in _CUTS:
                    self.parts[source[0]].append(set(each.unique().long().tolist()))
        return result


def rows_of(fused: Fused, count: int) -> list[set[int]]:
    starts = range(0, count, sum(fused.sizes))
    ends = [sum(fused.sizes[:place]) for place in range(len(fused.sizes))]
    return [
        {start + end + row for start in starts for row in range(size)}
        for end, size in zip(ends, fused.sizes, strict=True)
    ]


@pytest.mark.parametrize(
    "family",
    [*_FEW, *(pytest.param(f, marks=pytest.mark.slow) for f in TASKS["causal"] if f not in _FEW)],
)
def test_fused_parameters_are_cut_where_the_forward_cuts_them(family):
    try:
        model = make_tiny("causal", family)
    except Exception as error:  # cannot be made tiny in this way
        pytest.skip(str(error))
    fused = fused_parameters(model)
    layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in fused}
    known = {n: layer for n, layer in layers.items() if is_transposed(layer) is not None}
    cuts = Cuts(known)
    try:
        with torch.no_grad(), cuts:
            tokens = batch_of("causal", torch.Generator().manual_seed(0))
            model(input_ids=tokens, use_cache=False)
    except Exception as error:
        pytest.skip(str(error))
    for name in known:
        if not any(word in f"{family} {name}" for word in _NOT_SEEN):
            rows = model.get_parameter(name).shape[fused[name].dim]
            for part in rows_of(fused[name], rows):
                assert part in cuts.parts[name], (name, fused[name])


def test_queries_with_gates_are_cut_by_head():
    config = transformers.AutoConfig.for_model(
        "qwen3_next", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=2, vocab_size=64, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert fused_parameters(model)["model.layers.1.self_attn.q_proj.weight"] == Fused(-2, (8, 8))


def test_experts_are_cut_as_transformers_declares_them():
    sides = {"gpt_oss": Fused(-1, (1, 1)), "llama4_text": Fused(-1, (48, 48)),
             "mixtral": Fused(-2, (48, 48))}  # fmt: skip
    for family, expected in sides.items():
        fused = fused_parameters(make_tiny("causal", family))
        experts = {name.split(".")[-1]: each for name, each in fused.items() if "expert" in name}
        assert experts == {"gate_up_proj": expected}


@pytest.mark.parametrize(
    ("family", "role", "names"),
    [
        ("gpt_oss", "vector", ["gate_up_proj_bias", "down_proj_bias", "norm.weight", "sinks"]),
        ("gpt_oss", "matrix", ["experts.gate_up_proj", "experts.down_proj", "q_proj.weight"]),
        ("gpt_oss", "other", ["router.weight", "embed_tokens.weight"]),
        ("jamba", "vector", ["A_log", "mamba.D", "conv1d.bias"]),
        ("jamba", "other", ["conv1d.weight", "router.weight"]),
        ("rwkv", "vector", ["time_mix_key"]),
        ("xlnet", "other", ["rel_attn.q", "rel_attn.o"]),
        ("xlnet", "vector", ["rel_attn.r_w_bias"]),
        ("phimoe", "other", ["router.weight"]),
        ("llama4_text", "other", ["router.weight"]),
        ("qwen2_moe", "other", ["mlp.gate.weight"]),
        ("deepseek_v4", "other", ["o_a_proj.weight", "attn_hc.fn"]),
        ("gpt2", "matrix", ["c_attn.weight", "c_proj.weight"]),
        ("gpt2", "other", ["wpe.weight", "wte.weight"]),
    ],
)
def test_roles_follow_the_modules(family, role, names):
    model = make_tiny("causal", family)
    roles, _ = describe_parameters(model)
    for name in names:
        found = {each: roles[each] for each in roles if each.endswith(name)}
        assert found, name
        assert set(found.values()) == {role}, name


def test_norms_of_heads_and_biases_do_not_decay():
    config = transformers.AutoConfig.for_model(
        "cohere", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        num_hidden_layers=2, intermediate_size=48, use_qk_norm=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    params = [param for unit in divide_module(model, None) for param in unit.params]
    norms = [param for param in params if "q_norm" in param.name]
    assert {len(param.shape) for param in norms} == {2}
    assert {decay_group(param) for param in norms} == {1}
    assert not any(map(is_muons, norms))
    assert any(map(is_muons, params))


class Plain(nn.Module):
    """Has experts without names that transformers knows."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.empty(4, 8, 6))
        self.shift = nn.Parameter(torch.empty(4, 6))
        self.gate = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(8, 2)


def test_modules_of_users_are_classified_by_their_structure():
    roles, fused = describe_parameters(Plain())
    assert roles["stack"] == roles["gate.weight"] == roles["attention.out_proj.weight"] == "matrix"
    assert roles["shift"] == "vector"
    assert fused == {"attention.in_proj_weight": Fused(-2, (8, 8, 8))}


def test_weights_that_the_code_around_a_layer_reads_are_found():
    found = {family: read_elsewhere(make_tiny("causal", family)) for family in ("jamba", "bloom")}
    assert {name.rpartition(".")[2] for name in found["jamba"]} == {"dt_proj"}
    assert not found["bloom"]
