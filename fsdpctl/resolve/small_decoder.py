"""A small copy of a decoder of transformers: one block of each kind, with narrow parts."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fsdpctl.config.any_decoder import CONFIG_OF, canonical, content_of, read_configuration
from fsdpctl.config.model import ModelConfig
from fsdpctl.engine.describe import block_names
from fsdpctl.errors import UsageError
from fsdpctl.models.transformers_build import build_transformers, fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder

_META = torch.device("meta")
_KINDS = 4  # of blocks, in the copy
# Widths that matter for the size of the copy, not for what its tokens see.
_SHRUNK = {
    "vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "ffn_dim": 64,
    "shared_expert_intermediate_size": 32, "ffn_hidden_size": 64, "n_inner": 64,
    "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "n_positions": 512,
    "max_position_embeddings": 1 << 16,
}  # fmt: skip
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def small_decoder(model: ModelConfig) -> tuple[TransformersDecoder, ModelConfig]:
    """Return a copy with one block of each kind on the meta device, and its configuration."""
    content = content_of(model)
    told = read_configuration(content, CONFIG_OF).to_dict()  # with what the file leaves out
    sizes = {name: told.get(name) for name in _SHRUNK}
    small = {name: min(size, _SHRUNK[name]) for name, size in sizes.items() if type(size) is int}
    few = {name: None for name in _TOKENS if name in content}
    small_model = replace(model, config_json=canonical({**content, **small, **few}))
    try:
        return _cut(small_model), small_model
    except (UsageError, RuntimeError, ValueError):  # a family whose sizes depend on these
        return _cut(model), model


def small_copy(model: ModelConfig) -> TransformersDecoder:
    """Return the same with random weights, on the CPU."""
    module, small_model = small_decoder(model)
    module.train(False)
    fill_buffers(module)
    _check_buffers(module, small_model)
    allocate(module)
    module.transformers_model.apply(module.transformers_model._init_weights)
    for param in module.parameters():
        if param.ndim > 1:  # so that what a token sees changes its logits by much
            param.normal_(0.0, param.shape[-1] ** -0.5)
    return module


def fill_unknown(module: TransformersDecoder, model: ModelConfig) -> None:
    """Give buffers that `fill_buffers` leaves unknown the values of building the module."""
    if any(bool(buffer.isnan().any()) for buffer in module.buffers()):
        built = _built_buffers(model)
        for name, buffer in module.named_buffers():
            if bool(buffer.isnan().any()):
                buffer.copy_(built[name])


def _built_buffers(model: ModelConfig) -> dict[str, Tensor]:
    """Return the buffers of building the module, whose parameters take no memory."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        return dict(_cut(model, torch.device("cpu")).named_buffers())
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _check_buffers(module: TransformersDecoder, model: ModelConfig) -> None:
    """Check that `fill_buffers` gives the values that building the module gives, and use those.

    Raises:
        UsageError: If a buffer has other values, and is not read with the weights.
    """
    built = _built_buffers(model)
    read = module.state_dict().keys() if model.is_pretrained else ()
    for name, buffer in module.named_buffers():
        is_unknown = bool(buffer.isnan().any())
        if not torch.equal(buffer, built[name]) and not (is_unknown and name in read):
            raise UsageError(
                f"model=transformers: {type(module.transformers_model).__name__}: not supported; "
                f"transformers does not say how {name} is computed"
            )
        buffer.copy_(built[name])


def allocate(module: nn.Module) -> None:
    """Give zeros to parameters on the meta device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, param in each._parameters.items():
            if param is not None:
                zeros = torch.zeros_like(param, device="cpu")
                each._parameters[name] = made.setdefault(id(param), nn.Parameter(zeros))


def _cut(model: ModelConfig, device: torch.device = _META) -> TransformersDecoder:
    """Build the model, and keep the first block of each kind."""
    with device:
        module = build_transformers(model)
    names = block_names(module)
    if not names:
        return module
    owner = names[0].rpartition(".")[0]
    blocks = module.get_submodule(owner)
    config = module.transformers_model.config
    count = len(names)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != count:
        return module
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list) and len(value) == count
    }
    kinds: dict[object, int] = {}
    for number, block in enumerate(blocks):
        shapes = tuple((name, tuple(each.shape)) for name, each in block.named_parameters())
        kind = (type(block), shapes, tuple(str(each[number]) for each in lists.values()))
        kinds.setdefault(kind, number)
    kept = sorted([*kinds.values()][:_KINDS])
    kept = sorted({*kept, *range(min(2, count))})
    for key, value in lists.items():
        setattr(config, key, [value[number] for number in kept])
    config.num_hidden_layers = len(kept)
    remaining = [blocks[number] for number in kept]
    del blocks[:]
    blocks.extend(remaining)
    return module
