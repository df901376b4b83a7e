"""A small copy of a decoder of transformers: one block of each kind, with small widths."""

import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.config.decoder_config import (
    CONFIG_LOCATION,
    config_dict,
    read_hf_config,
    resize,
    with_config,
)
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError
from fsdpctl.models.module_spec import block_names, replace_meta_parameters
from fsdpctl.models.transformers_build import build_transformers, fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder

VOCABULARY = 64
_MAX_KINDS = 4  # kinds of blocks in the copy
_HEAD_DIM = 8
# Sizes that don't affect which tokens attend to each other.
_MAX_SIZES = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "intermediate_size": 64,
    "moe_intermediate_size": 32, "ffn_dim": 64, "shared_expert_intermediate_size": 32,
    "ffn_hidden_size": 64, "n_inner": 64, "num_experts": 16, "num_local_experts": 16,
    "n_routed_experts": 16, "moe_num_experts": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 8, "linear_head_dim": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_heads": 4,
    "mamba_d_state": 16, "ssm_state_size": 16, "n_positions": 512,
    "max_position_embeddings": 1 << 16, "encoder_hash_byte_group_vocab": VOCABULARY,
}  # fmt: skip
_MAX_PARAMETERS = 1 << 27  # parameters of a copy; a check has three copies in memory
_HEAD_COUNTS, _HEAD_DIMS = r"num_(key_value_|attention_)?heads|n_heads", r"head_dim|d_head"
# Divisors of widths, each with the keys of heads that it divides too: the number or the size.
_DIVISIONS = [(factor, heads) for factor in (64, 16, 4) for heads in (_HEAD_COUNTS, _HEAD_DIMS)]
# Layer counts of nested configurations, such as an image encoder's.
_LAYER_KEYS = ("num_hidden_layers", "num_blocks")
_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
_Copy = tuple[ModelConfig, TransformersDecoder]


def small_copy(model: ModelConfig, device: torch.device = torch.device("cpu")) -> Any:
    """Return an initialized small copy in eval mode; UsageError if the model is not supported."""
    module = meta_copy(model)
    allocate(module)
    for name, param in module.named_parameters():
        init_by_name(name, param)
    return module.train(False).to(device)


def meta_copy(model: ModelConfig) -> nn.Module:
    """Return a small copy with parameters on the meta device and buffers on the CPU."""
    return copy.deepcopy(_cached_meta_copy(replace(model, name="")))


@lru_cache(maxsize=2)  # building all blocks of a large model takes seconds
def _cached_meta_copy(model: ModelConfig) -> nn.Module:
    content = config_dict(model)
    keys = read_hf_config(content, CONFIG_LOCATION).to_dict()  # with defaults
    tokens = {name: token for name, token in _SPECIAL_TOKENS.items() if keys.get(name) is not None}
    content = {**content, **_shrink(keys), **tokens}
    head_dims = {name: keys[name] for name in keys if name.endswith("head_dim")}
    # Some families may support only their own head_dim.
    copies = (_first_small({**content, **sizes}, model) for sizes in ({}, head_dims))
    shrunk, module = next(filter(None, copies), None) or _full_width(model)
    _check_buffers(module, shrunk)
    return module


def _first_small(content: Mapping[str, Any], model: ModelConfig) -> _Copy | None:
    """Return the first copy that is small enough, and that runs if its widths are reduced."""
    for reduce in (_narrow, None, *(partial(_divide, division=each) for each in _DIVISIONS)):
        try:
            shrunk = with_config(model, reduce(content) if reduce else content)
            module = _build_few_blocks(shrunk, "meta")
            if _count(module) <= _MAX_PARAMETERS:
                if reduce:
                    _check_forward(module)
                return shrunk, module
        except Exception:  # invalid sizes for the family, whose code may raise any exception
            continue
    return None


def _full_width(model: ModelConfig) -> _Copy:
    module = _build_few_blocks(model, "meta")
    if (count := _count(module)) > _MAX_PARAMETERS:
        name = type(module.transformers_model).__name__
        raise UsageError(f"model: {name}: not supported; a small copy has {count:,} parameters")
    return model, module


def _count(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _divide(content: Mapping[str, Any], division: tuple[int, str]) -> dict[str, Any]:
    """Divide widths, and the sizes whose keys match the division's pattern of heads."""
    keys, (factor, heads) = read_hf_config(content, CONFIG_LOCATION).to_dict(), division
    pattern = re.compile(rf"{heads}|(hidden|embedding|model|inner)_?(size|dim)|d_model|width")
    sizes = {key: x for key, x in keys.items() if type(x) is int and pattern.search(key)}
    return {**content, **{key: max(1, size // factor) for key, size in sizes.items()}}


def _narrow(content: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the width of heads, if that reduces the width of the residual stream."""
    config = read_hf_config(content, CONFIG_LOCATION)
    head_dim = min(getattr(config, "head_dim", None) or _HEAD_DIM, _HEAD_DIM)
    hidden_size = min(config.num_attention_heads * head_dim, config.hidden_size)
    narrow = resize(content, {"hidden_size": hidden_size}, CONFIG_LOCATION)
    return resize(narrow, {"head_dim": head_dim}, CONFIG_LOCATION)  # a key of its own, or implied


def _shrink(keys: Mapping[str, Any]) -> dict[str, Any]:
    shrunk: dict[str, Any] = {}
    for name, value in keys.items():
        if isinstance(value, dict) and (inner := _shrink(value)):
            counts = {x: min(2, value[x]) for x in _LAYER_KEYS if type(value.get(x)) is int}
            shrunk[name] = {**value, **inner, **counts}
        elif name in _MAX_SIZES and type(value) is int:
            shrunk[name] = min(value, _MAX_SIZES[name])
    return shrunk


@torch.no_grad()
def _check_forward(module: TransformersDecoder) -> None:
    module_copy = copy.deepcopy(module).train(False)
    allocate(module_copy)
    module_copy.attention.use(fsdpctl=False)  # only sizes are checked
    module_copy(torch.zeros(1, 8, dtype=torch.int64))


@torch.no_grad()
def init_by_name(name: str, tensor: Tensor) -> None:
    """Initialize a parameter from its name; matrices preserve the scale of their inputs."""
    if tensor.ndim <= 1:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    std = tensor.shape[-1] ** -0.5
    tensor.copy_(torch.empty(tensor.shape).normal_(0.0, std, generator=generator))


def allocate(module: nn.Module) -> None:
    """Replace parameters on the meta device by zeros; tied parameters stay tied."""
    replace_meta_parameters(module, lambda param: torch.zeros_like(param, device="cpu"))


def _build_few_blocks(model: ModelConfig, device: str) -> TransformersDecoder:
    with torch.device(device):
        module = build_transformers(model)
    if device == "meta":
        fill_buffers(module)  # before the configuration loses blocks
    names, config = block_names(module), module.transformers_model.config
    blocks, count = module.get_submodule(names[0].rpartition(".")[0] if names else ""), len(names)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != count:
        return module
    values = vars(config).items()
    # One value per block, such as `layer_types`.
    lists = {key: x for key, x in values if isinstance(x, list) and len(x) == count}
    first_of_kind: dict[object, int] = {}
    for index, block in enumerate(blocks):
        shapes = tuple((name, tuple(each.shape)) for name, each in block.named_parameters())
        kind = (type(block), shapes, tuple(str(each[index]) for each in lists.values()))
        first_of_kind.setdefault(kind, index)
    indices = sorted({*[*first_of_kind.values()][:_MAX_KINDS], *range(min(2, count))})
    for key, value in lists.items():
        setattr(config, key, [value[index] for index in indices])
    config.num_hidden_layers = len(indices)
    remaining = [blocks[index] for index in indices]
    del blocks[:]
    blocks.extend(remaining)
    return module


def _check_buffers(module: TransformersDecoder, model: ModelConfig) -> None:
    """Check buffers against a copy that is built on the CPU, and copy its values."""
    expected = _reference_buffers(model)
    stored = module.state_dict().keys() if model.is_pretrained else ()
    for name, buffer in module.named_buffers():
        is_nan = bool(buffer.isnan().any())
        if not torch.equal(buffer, expected[name]) and not (is_nan and name in stored):
            problem = f"not supported; transformers' initialization does not compute {name}"
            raise UsageError(f"model: {type(module.transformers_model).__name__}: {problem}")
        buffer.copy_(expected[name])


def _reference_buffers(model: ModelConfig) -> dict[str, Tensor]:
    """Return the buffers of the copy as built on the CPU, without memory for its parameters."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            meta = nn.Parameter(param.to("meta"), param.requires_grad)
            meta._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then skips it
            module._parameters[name] = meta

    # The patch affects all threads: no other thread may build modules now.
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        return dict(_build_few_blocks(model, "cpu").named_buffers())
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
