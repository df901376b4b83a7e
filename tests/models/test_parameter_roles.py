"""The roles of parameters match their use in the forward."""

import pytest
import torch
import transformers
from torch import nn

from fsdpctl.models.linear_layers import layers_read_directly
from fsdpctl.models.module_spec import module_units, parameter_roles
from fsdpctl.plan.layout import decay_group
from fsdpctl.plan.optimizers import uses_muon
from tests.models.tiny import make_tiny


@pytest.mark.parametrize(("family", "role", "names"), [
    ("gpt_oss", "vector", ["gate_up_proj_bias", "down_proj_bias", "norm.weight", "sinks"]),
    ("gpt_oss", "matrix", ["experts.gate_up_proj", "experts.down_proj", "q_proj.weight"]),
    ("gpt_oss", "other", ["router.weight", "embed_tokens.weight"]),
    ("jamba", "vector", ["A_log", "mamba.D", "conv1d.bias"]),
    ("jamba", "other", ["conv1d.weight", "router.weight"]),
    ("rwkv", "vector", ["time_mix_key"]), ("xlnet", "other", ["rel_attn.q", "rel_attn.o"]),
    ("xlnet", "vector", ["rel_attn.r_w_bias"]), ("phimoe", "other", ["router.weight"]),
    ("llama4_text", "other", ["router.weight"]), ("qwen2_moe", "other", ["mlp.gate.weight"]),
    ("deepseek_v4", "other", ["o_a_proj.weight", "attn_hc.fn"]),
    ("gpt2", "matrix", ["c_attn.weight", "c_proj.weight"]),
    ("gpt2", "other", ["wpe.weight", "wte.weight"]),
])  # fmt: skip
def test_roles_follow_the_modules(family, role, names):
    roles = parameter_roles(make_tiny("causal", family))
    for name in names:
        result = {each: roles[each] for each in roles if each.endswith(name)}
        assert result, name
        assert set(result.values()) == {role}, name


def test_norms_of_heads_and_biases_do_not_decay():
    config = transformers.AutoConfig.for_model(
        "cohere", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        num_hidden_layers=2, intermediate_size=48, use_qk_norm=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    params = [param for unit in module_units(model, None) for param in unit.params]
    norms = [param for param in params if "q_norm" in param.name]
    assert {len(param.shape) for param in norms} == {2}
    assert ({decay_group(param) for param in norms}, any(map(uses_muon, norms))) == ({1}, False)
    assert any(map(uses_muon, params))


class Plain(nn.Module):
    """A model with experts whose names transformers does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.empty(4, 8, 6))
        self.shift = nn.Parameter(torch.empty(4, 6))
        self.gate = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(8, 2)


def test_modules_of_users_are_classified_by_their_structure():
    roles = parameter_roles(Plain())
    assert roles["stack"] == roles["gate.weight"] == roles["attention.out_proj.weight"] == "matrix"
    assert roles["shift"] == "vector"


def test_weights_that_the_code_around_a_layer_reads_are_found():
    jamba, bloom = (layers_read_directly(make_tiny("causal", x)) for x in ("jamba", "bloom"))
    assert {name.rpartition(".")[2] for name in jamba} == {"dt_proj"}
    assert not bloom
