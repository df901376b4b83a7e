"""Tiny causal decoders of transformers, in directories as on the Hub."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, tensor_key
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.staging import tensor_from_bytes
from fsdpctl.checkpoint.tensor_source import TensorSource
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.config.compose import compose_config
from fsdpctl.config.decoder_config import read_hf_config, sizes_and_config
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config, Resolved
from fsdpctl.config.serialize import to_settings
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.models.build_model import build_model, initialize_parameter
from fsdpctl.models.decoder_check import adapt_to_decoder
from fsdpctl.models.small_copy import allocate
from fsdpctl.models.transformers_build import fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model, make_module
from tests.models.tiny import FAMILY_SIZES, WORDS, _sizes

LENGTH = 16
CPU = torch.device("cpu")
# Sizes that tests.models.tiny does not set.
_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "ministral": {"head_dim": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_expand": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2,
     "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "nemotron": {"num_key_value_heads": 2},
    "zamba": {"layer_types": ["mamba", "hybrid"], "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(family: str) -> Any:
    """Return transformers' configuration of a tiny decoder.

    Raises:
        Exception: If the family cannot be made tiny by changing its sizes.
    """
    sizes = _sizes(hf.AutoConfig.for_model(family)) | FAMILY_SIZES.get(family, {})
    sizes |= _SIZES.get(family, {})
    content = hf.AutoConfig.for_model(family, **sizes).to_json_string()
    settings = sizes_and_config(json.loads(content), family)
    return read_hf_config(json.loads(settings["model.config_json"]), family)


def save_decoder(family: str, folder: Path, **settings: Any) -> None:
    """Write a tiny model with drawn weights to a directory, as transformers does."""
    config = tiny_config(family)
    for name, value in settings.items():
        with suppress(NotImplementedError):  # some are read-only, such as xlnet's positions
            setattr(config, name, value)
        if hasattr(config, f"decoder_{name}"):
            setattr(config, f"decoder_{name}", value)
    torch.manual_seed(0)
    make: Any = hf.AutoModelForCausalLM
    model = make.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0.0, 0.3 / param.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def load_decoder(folder: Path, **settings: Any) -> Any:
    """Return the model as transformers loads it, in float32, without dropout."""
    make: Any = hf.AutoModelForCausalLM
    return make.from_pretrained(folder, dtype=torch.float32, **settings).eval()


def batches_of(steps: int, ranks: int, seed: int = 1) -> list[list[list[Tensor]]]:
    """Draw sequences of tokens: [step][rank][micro-batch], each (2, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [[torch.randint(3, WORDS, (2, LENGTH + 1), generator=generator)] for _ in range(ranks)]
        for _ in range(steps)
    ]


def our_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:], 9)
    return loss / tokens[:, 1:].numel()


_softmax = F.softmax
_float = Tensor.float


def _exact_softmax(scores: Tensor, dim: int, dtype: Any = None, **others: Any) -> Tensor:
    """Return the softmax without the cast of float64 scores to float32 in eager attention."""
    return _softmax(scores, dim, dtype=None if scores.dtype == torch.float64 else dtype)


def _exact_float(values: Tensor) -> Tensor:
    """Return float64 values unchanged: attention and routers cast their scores to float32."""
    return values if values.dtype == torch.float64 else _float(values)


def exact_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of our or transformers' model, without casts to float32."""
    is_theirs = isinstance(model, hf.PreTrainedModel)
    with (
        mock.patch.object(F, "softmax", _exact_softmax),
        mock.patch.object(Tensor, "float", _exact_float),
    ):
        result = model(tokens[:, :-1], **({"use_cache": False} if is_theirs else {}))
    logits = result.logits if is_theirs else result
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def their_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def compose(folder: Path, *args: str) -> Resolved:
    fixed = ["model=hf", f"model.path={folder}"]
    if not any(arg.startswith("precision=") for arg in args):
        fixed.append("precision=fp32")
    return stored_config(compose_config([*fixed, *args]).config)


def saved(
    model: ShardedModel, config: Config, folder: Path, assets: Mapping[str, bytes] | None = None
) -> CheckpointReader:
    """Save a model without its optimizer; return the checkpoint."""
    options = CheckpointMetadata(Progress(1), to_settings(config), assets or {})
    ranks = model.collectives
    write_checkpoint(folder, take_snapshot(model, None, ranks.rank, options), ranks)
    return CheckpointReader(folder)


def load(config: Resolved, strategy: str = "full_shard") -> ShardedModel:
    model = make_model(config, CPU, strategy=strategy, empty=True)
    load_weights(open_weights(config.model), model)
    return model


def whole(weights: TensorSource, key: str) -> torch.Tensor:
    info = weights.info(key)
    read = b"".join(bytes(data) for _, data in weights.read(key))
    return tensor_from_bytes(memoryview(bytearray(read)), info.dtype).view(info.shape)


def fill(module: nn.Module, weights: TensorSource) -> None:
    """Give values to the parameters and buffers of a module on the meta device."""
    allocate(module)
    with torch.no_grad():
        for kind, tensors in (
            (PARAMETER, module.named_parameters()),
            (BUFFER, module.named_buffers()),
        ):
            stored = set(weights.names(kind))
            for name, each in tensors:
                if kind == PARAMETER or name in stored:
                    each.copy_(whole(weights, tensor_key(kind, name)))


def drawn(model: ModelConfig, seed: int = 0) -> TransformersDecoder:
    """Return a model with its initial weights, without an engine."""
    module = build_model(model)
    fill_buffers(module)
    allocate(module)
    with torch.no_grad():
        for name, param in module.named_parameters():
            initialize_parameter(name, param, seed=seed, config=model)
    return module


def plain_module(folder: Path, *args: str) -> TransformersDecoder:
    """Return a model with experts and its weights, without an engine."""
    config, _ = adapt_to_decoder(compose(folder, *args))
    module = make_module(config)
    assert isinstance(module, TransformersDecoder)
    fill(module, open_weights(config.model))
    return module
