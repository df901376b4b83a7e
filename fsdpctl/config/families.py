"""The names of model settings in Hugging Face's architectures."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Names:
    """The names of fsdpctl's keys in a config.json, and defaults for names that may be missing."""

    of_keys: dict[str, str]
    defaults: dict[str, Any]


_LLAMA_LIKE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "head_dim": None,
}
_BIASES = {"attention_bias": "attention_bias"}
_OF_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
NAMES = {
    "llama": Names(
        {**_LLAMA_LIKE, **_BIASES, "mlp_bias": "mlp_bias"},
        {**_COMMON, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Names(
        _LLAMA_LIKE,
        {**_COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    ),
    "qwen2": Names(_LLAMA_LIKE, {**_COMMON, "max_position_embeddings": 32768}),
    "qwen3": Names(
        {**_LLAMA_LIKE, **_BIASES},
        {**_COMMON, "max_position_embeddings": 32768, "head_dim": 128, "attention_bias": False},
    ),
    "gemma": Names(
        _LLAMA_LIKE,
        {
            **_COMMON,
            **_OF_GEMMA,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
        },
    ),
    "gemma3_text": Names(
        {
            **_LLAMA_LIKE,
            "activation": "hidden_activation",
            "query_scalar": "query_pre_attn_scalar",
        },
        {
            **_COMMON,
            **_OF_GEMMA,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
        },
    ),
    "phi3": Names(
        _LLAMA_LIKE,
        {**_COMMON, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "gpt2": Names(
        {
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_heads": "n_head",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "tie_embeddings": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        {
            "n_inner": None,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
    ),
}
