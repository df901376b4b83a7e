"""fsdpctl reads every config.json as transformers does, or refuses it."""

import json
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from fsdpctl.config.decoder_config import exported_config, sizes_and_config
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.small_copy import allocate
from fsdpctl.models.transformers_build import fill_buffers
from tests.models.families import VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt2"]


def rope(kind: str, **kwargs: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, **kwargs}, "rope_theta": 700.0}


BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TOP = {"original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
EDITS: list[dict[str, Any]] = [
    {}, {"rope_theta": 500}, {"rope_scaling": None, "rope_theta": 300.0},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, rope("yarn") | TOP,
    rope("yarn", mscale=0.7, mscale_all_dim=1.0, **TOP), rope("llama3", **BANDS) | TOP,
    rope("longrope", **LONG) | TOP, rope("proportional"),
    {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, **rope("linear")},
    {"sliding_window": 5, "use_sliding_window": True, "layer_types": KINDS},
    {"num_key_value_heads": None}, {"head_dim": None}, {"hidden_act": "quick_gelu"},
    {"tie_word_embeddings": True}, {"final_logit_softcapping": 2.0},
    {"logit_scale": 3.0, "residual_multiplier": 2.0, "note": "x"},
    {"torch_dtype": "bfloat16", "use_cache": False, "num_labels": 3}, {"pad_token_id": 3},
    {"per_layer_config": {"0": {"intermediate_size": 40}}},
]  # fmt: skip


def content_of(family: str, edit: dict[str, Any]) -> dict[str, Any]:
    base = GPT2 if family == "gpt2" else SIZES
    content: dict[str, Any] = json.loads(json.dumps({"model_type": family, **base, **edit}))
    return content


def theirs_of(content: dict[str, Any]) -> nn.Module:
    fields = {name: value for name, value in content.items() if name != "torch_dtype"}
    config = hf.AutoConfig.for_model(**json.loads(json.dumps(fields)))
    torch.manual_seed(0)
    make: Any = hf.AutoModelForCausalLM
    model: nn.Module = make.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(1.0 if param.ndim == 1 else 0.0, 0.2)
    return model


def model_of(content: dict[str, Any]) -> ModelConfig:
    settings = sizes_and_config(content, "config.json")
    values: dict[str, Any] = {x[6:]: KEYS[x].parse(text) for x, text in settings.items()}
    return ModelConfig(**values)


def ours_of(model: ModelConfig, theirs: nn.Module) -> nn.Module:
    module = build_base_model(model)
    fill_buffers(module)
    allocate(module)
    values = dict(theirs.named_parameters())
    assert values.keys() == dict(module.named_parameters()).keys()
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(values[name])
    return module.eval()


@torch.no_grad()
def check(family: str, edit: dict[str, Any]) -> str:
    """Compare the logits; return the problem."""
    content = content_of(family, edit)
    tokens = torch.randint(0, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    try:
        theirs = theirs_of(content)
        wanted = theirs(tokens, use_cache=False).logits
    except Exception:
        theirs = None
    try:
        model = model_of(content)
        if theirs is None:
            build_base_model(model)
            return ""  # the check of a small copy refuses it
        result = ours_of(model, theirs)(tokens)
    except UsageError as error:
        text = str(error)
        return "" if theirs is None and "\n" not in text else f"refused: {text}"
    difference = float((result - wanted).abs().max() / wanted.abs().max())
    return "" if difference <= 1e-5 else f"differs by {difference}"


def problems_of(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    results = [(f"{family} {edit}", check(family, edit)) for family, edit in cases]
    return [f"{case}: {problem}" for case, problem in results if problem]


def test_logits_are_those_of_transformers():
    assert not problems_of([(FAMILIES[n % len(FAMILIES)], edit) for n, edit in enumerate(EDITS)])


@pytest.mark.slow
def test_logits_are_those_of_transformers_for_every_edit():
    assert not problems_of([(family, edit) for edit in EDITS for family in FAMILIES])


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("llama", {key: value})
    for key, value in [
        ("num_hidden_layers", None), ("num_hidden_layers", True), ("num_hidden_layers", 2.5),
        ("rms_norm_eps", True), ("initializer_range", -0.1), ("text_config", "x"),
        ("text_config", {"a": 1}), ("decoder", {"a": 1}), ("generator", 1), ("mlp_bias", 7),
        ("rope_scaling", [1]), ("rope_scaling", "x"), ("tie_word_embeddings", "maybe"),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("family", "edit"), INVALID, ids=str)
def test_a_value_that_nobody_means_is_named(family, edit):
    with pytest.raises(UsageError) as caught:
        sizes_and_config({"model_type": family, **edit}, "DIR/config.json")
    text = str(caught.value)
    assert text.startswith("DIR/config.json: ")
    assert "\n" not in text
    assert next(iter(edit)).replace("rope_scaling", "rope")[:4] in text
    assert len(text) < 500


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_configuration_is_equal_when_read_again(family):
    for edit in ({}, rope("yarn", **TOP), {"sliding_window": 5}, {"tie_word_embeddings": True}):
        content = content_of(family, edit)
        try:
            model = model_of(content)
        except UsageError:
            continue  # a kind of rope that the family does not have
        source = {**content, "torch_dtype": "float16", "architectures": ["Own"], "note": "x"}
        written = exported_config(model, "float32", source)
        assert (written["dtype"], written["architectures"]) == ("float32", ["Own"])
        copies = (json.loads(json.dumps(each)) for each in (source, written))
        one, two = (hf.AutoConfig.for_model(**each) for each in copies)
        differing = {
            key
            for key, value in one.to_dict().items()
            if two.to_dict().get(key) != value and key not in ("dtype", "transformers_version")
        }
        assert not differing
