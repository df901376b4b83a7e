"""Tiny models of every family that fsdpctl offers, made by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY, LENGTH = 320, 48
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.15,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "initializer_range": 0.15, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**_SIZES),
    "llama tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama biased": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama 3.1": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "llama stretched": LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama yarn": LlamaConfig(**_SIZES, rope_parameters=_YARN),
    "llama gelu": LlamaConfig(**_SIZES, hidden_act="gelu_pytorch_tanh"),
    "mistral": MistralConfig(**_SIZES),
    "mistral window": MistralConfig(**_SIZES, sliding_window=9),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen2 window": Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    "qwen3 tied": Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True),
    "gemma": GemmaConfig(**_SIZES, head_dim=16, hidden_act="gelu"),
    "gemma3": Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": Phi3Config(**_SIZES, pad_token_id=0),
    "phi3 window": Phi3Config(**_SIZES, pad_token_id=0, sliding_window=9),
    "gpt2": GPT2Config(**_GPT2),
    "gpt2 untied": GPT2Config(**_GPT2, tie_word_embeddings=False),
}


FEW = ["mistral window", "gemma3", "gpt2", "qwen3"]  # each kind of attention, for fast tests
OTHERS = [each for each in FAMILIES if each not in FEW]


def save_model(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> PreTrainedModel:
    """Save a model with every parameter drawn, norms and biases too, in `folder`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_norm = "norm" in name and param.ndim == 1 and not family.startswith("gemma")
            param.normal_(1.0 if is_norm else 0.0, 0.15, generator=generator)
    model.to(dtype=dtype).eval()  # type: ignore[call-arg]  # its decorator hides the signature
    model.save_pretrained(folder, **kwargs)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
