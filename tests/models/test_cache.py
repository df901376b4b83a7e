"""Generation with a cache of keys and values returns the same text as without."""

from typing import Any

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.training.callbacks.generation import Sampling, generate
from tests.models.decoders import drawn

VOCABULARY = 60
SIZES = [
    "model.num_layers=3", "model.hidden_size=32", "model.intermediate_size=48", "model.num_heads=4",
    f"model.vocab_size={VOCABULARY}", "model.max_seq_len=64",
]  # fmt: skip
MODELS = {
    "llama": ["model.num_kv_heads=2"],
    "mistral": ["model.overrides.model_type=mistral", "model.overrides.sliding_window=7"],
    "qwen3": ["model.overrides.model_type=qwen3", "model.num_kv_heads=1"], "gpt2": ["model=gpt2"],
}  # fmt: skip


def make_model(name: str) -> torch.nn.Module:
    module = drawn(compose_config([*SIZES, *MODELS[name]]).config.model, seed=1).double()
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(4)  # so that the text depends on the prompt
    return module


@pytest.mark.parametrize("name", MODELS)
def test_text_longer_than_the_context_is_the_same(name):
    model = make_model(name)
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    options: dict[str, Any] = {
        "context": 16,
        "sampling": Sampling(3),
        "device": torch.device("cpu"),
    }
    with_cache = list(generate(model, [1, 2, 3], range(30), **options))
    assert lengths == [3, *[1] * 13, *[16] * 16]
    assert with_cache == list(generate(model, [1, 2, 3], range(30), **options, use_cache=False))
