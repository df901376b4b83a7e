"""Tiny models of all families that transformers maps to a task, without code for a family."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

WORDS, LENGTH, PIXELS, CLASSES, WIDTH, HEADS = 64, 12, 32, 4, 32, 4
TASKS: dict[str, dict[str, Any]] = {
    "causal": dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": dict(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": dict(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "image": dict(modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
}
# Keys of sizes in configurations; a key that a family does not have is left out.
_SIZES = {
    WORDS: [
        "vocab_size", "max_position_embeddings", "n_positions", "encoder_hash_byte_group_vocab",
    ],
    WIDTH: ["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size",
     "word_embed_proj_dim", "attention_hidden_size", "lru_width", "image_size", "mamba_d_ssm",
     "q_lora_rank", "kv_lora_rank"],
    48: ["intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
     "dff", "ffn_hidden_size", "dim_ff", "shared_intermediate_size"],
    16: ["moe_intermediate_size", "shared_expert_intermediate_size", "qk_head_dim", "kv_channels",
     "hidden_size_per_layer_input", "state_size"],
    8: ["head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "patch_size",
     "sliding_window", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head",
     "mamba_d_state", "swa_head_dim", "attention_head_dim", "d_kv", "linear_head_dim",
     "dim_head", "rotary_dim"],
    HEADS: ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
     "decoder_attention_heads", "num_experts", "n_routed_experts", "num_local_experts",
     "moe_num_experts", "linear_num_value_heads", "linear_num_key_heads", "linear_num_heads",
     "swa_num_attention_heads", "num_labels"],
    2: ["num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
     "decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_key_value_heads",
     "num_experts_per_tok", "num_experts_per_token", "swa_num_key_value_heads", "moe_topk",
     "moe_k", "type_vocab_size", "num_kv_heads"],
    1: ["n_group", "topk_group", "n_shared_experts", "num_expert_group", "first_k_dense_replace",
     "mamba_n_groups"],
}  # fmt: skip
# Families that cannot be made tiny in this way, that need other inputs than tokens or pixels, or
# that one process cannot train in float64; and those of test_unsupported_models_are_rejected.
LEFT_OUT: dict[str, list[str]] = {
    "causal": ["bamba", "blt", "cohere_compass_text", "dbrx", "deepseek_v2", "dots1", "dots3_note",
     "emu3", "falcon_h1", "gemma3n", "gemma3n_text", "gemma4_assistant",
     "gemma4_unified_assistant", "git", "gpt_neo", "granitemoehybrid", "hunyuan_v1_dense",
     "hunyuan_v1_moe", "inkling2_text", "lfm2_moe", "llama4", "longcat_flash", "mamba2",
     "ministral", "musicgen", "musicgen_melody", "nemotron", "qwen3_5", "qwen3_5_moe",
     "qwen4_exp", "reformer", "rwkv", "xglm", "xlm", "xmod", "zamba", "zamba2", "zaya"],
    "masked": [
        "esm", "esmc", "flaubert", "longformer", "luke", "mra", "neomme", "perceiver", "reformer",
        "squeezebert", "xlm", "xmod",
    ],
    "seq2seq": [
        "fsmt", "granite_speech", "granite_speech_plus", "led", "musicflamingo", "nemo_speechlm",
        "vibevoice_asr", "voxtral_realtime",
    ],
    "image": ["bit", "deit", "dinat", "donut-swin", "efficientnet", "hgnet_v2", "hiera", "imagegpt",
     "levit", "mobilevitv2", "perceiver", "pp_lcnet", "pvt", "pvt_v2", "shieldgemma2",
     "siglip2", "swin", "swinv2", "textnet", "timm_wrapper"],
}  # fmt: skip
FAMILY_SIZES = {"convnext": {"patch_size": 2}, "convnextv2": {"patch_size": 2}}
_LISTS = {"depths": 1, "hidden_sizes": 16, "embed_dims": 16, "embedding_sizes": 16, "num_heads": 2}
_SMALL = {key: size for size, keys in _SIZES.items() for key in keys}


def _sizes(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """Return tiny values for the sizes of a configuration."""
    results: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, hf.PreTrainedConfig):
            results[key] = _sizes(value)
        elif key in _SMALL and type(value) is int:
            results[key] = _SMALL[key]
        elif key in _LISTS and isinstance(value, list | tuple):
            results[key] = [_LISTS[key]] * len(value)
        elif key.endswith("_token_id") and type(value) is int:
            results[key] = value % WORDS
    if "kv_lora_rank" in results:
        results["num_key_value_heads"] = HEADS
    return results


def make_tiny(task: str, family: str) -> nn.Module:
    """Return a model with drawn values, in float64, without dropout."""
    usual = hf.AutoConfig.for_model(family)
    config = hf.AutoConfig.for_model(family, **_sizes(usual) | FAMILY_SIZES.get(family, {}))
    config.use_cache = False
    config.pad_token_id = config.decoder_start_token_id = 0
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # torch's grouped products do not support float64
    torch.manual_seed(0)
    model: nn.Module = getattr(hf, TASKS[task][family])(config)
    return model.double().eval()


def batch_of(task: str, generator: torch.Generator) -> Tensor:
    """Draw token ids of 3 samples, or 3 images."""
    if task == "image":
        return torch.randn(3, 3, PIXELS, PIXELS, generator=generator, dtype=torch.float64)
    return torch.randint(1, WORDS, (3, LENGTH), generator=generator)


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of predicting the tokens, or whether the corner of an image is bright."""
    if batch.dtype == torch.int64:
        loss: Tensor = module(input_ids=batch, labels=batch).loss
    else:
        loss = module(pixel_values=batch, labels=(batch[:, 0, 0, 0] > 0).long()).loss
    return loss
