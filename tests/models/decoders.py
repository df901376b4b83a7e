"""Tiny directories of the causal decoders of transformers, as they are on the Hub."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from fsdpctl.config.any_decoder import transformers_words
from tests.models.tiny import _OF_ITS_OWN, WORDS, _sizes

LENGTH = 16
# Sizes that the rule of tests.models.tiny does not find.
_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
}


def tiny_config(family: str) -> Any:
    """Return transformers' configuration of a tiny decoder.

    Raises:
        Exception: If the family cannot be made tiny by changing its sizes.
    """
    sizes = _sizes(hf.AutoConfig.for_model(family)) | _OF_ITS_OWN.get(family, {})
    content = hf.AutoConfig.for_model(
        family, **{**sizes, **_SIZES.get(family, {})}
    ).to_json_string()
    words = transformers_words(json.loads(content), family)
    text = json.loads(words["config_json"])
    config = hf.AutoConfig.for_model(text.pop("model_type"), **text)
    config.pad_token_id = None
    return config


def save_decoder(family: str, folder: Path, **settings: Any) -> None:
    """Write a tiny model with drawn weights to a directory, as transformers does."""
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    make: Any = hf.AutoModelForCausalLM
    model = make.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0.0, 0.3 / param.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def load_decoder(folder: Path) -> Any:
    """Return the model as transformers loads it, in float32, without dropout."""
    make: Any = hf.AutoModelForCausalLM
    return make.from_pretrained(folder, dtype=torch.float32).eval()


def batches_of(steps: int, ranks: int, seed: int = 1) -> list[list[list[Tensor]]]:
    """Draw sequences of tokens: [step][rank][micro-batch], each (2, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [[torch.randint(WORDS, (2, LENGTH + 1), generator=generator)] for _ in range(ranks)]
        for _ in range(steps)
    ]
