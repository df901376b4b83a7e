"""Checks of a decoder of transformers that its code does not answer: a small copy of it is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fsdpctl.config.any_decoder import canonical, content_of, family_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.engine.describe import block_names
from fsdpctl.errors import UsageError
from fsdpctl.models.documents import make_documents
from fsdpctl.models.transformers_build import build_transformers, fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder

_FIRST, _SECOND = 5, 7  # tokens of two documents in one sequence
_TOLERANCE = 1e-4  # of the largest logit; float32 differs by 1e-6, documents that mix by 1e-3
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


def with_packing(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with `data.packing` off if documents in a sequence would mix.

    Returns it with messages to print.

    Raises:
        UsageError: If the model sees later tokens, or `data.packing=true` would mix documents.
    """
    if not config.model.is_foreign:
        return config, ()
    family = family_of(config.model)
    isolates = check_decoder(config.model)
    if isolates or not config.data.holds_documents or config.data.packing is False:
        return config, ()
    if config.data.packing:
        raise UsageError(
            f"data.packing=true: {family} mixes the documents of a sequence; set data.packing=false"
        )
    note = f"data.packing=false (auto): {family} would mix the documents of a sequence"
    return replace(config, data=replace(config.data, packing=False)), (note,)


def check_decoder(model: ModelConfig) -> bool:
    """Return whether documents that share a sequence do not see one another.

    Raises:
        UsageError: If a token sees later ones, or logits of chunks are not those of the model.
    """
    try:
        with quiet():
            return _isolates(small_copy(model))
    except UsageError:
        raise
    except Exception as error:  # the code of a family raises what it likes
        family = family_of(model)
        line = str(error).partition("\n")[0]
        raise UsageError(
            f"model=transformers: {family}: not supported; a small copy fails: {line}"
        ) from error


def _isolates(module: TransformersDecoder) -> bool:
    vocab_size = module.get_output_embeddings().out_features
    tokens = torch.randint(vocab_size, (1, _FIRST + _SECOND))
    versions = [param._version for param in module.parameters()]
    whole = module(tokens)
    if versions != [param._version for param in module.parameters()]:
        raise UsageError(
            f"model=transformers: {type(module.transformers_model).__name__}: not supported; it "
            "writes to its parameters in forward"
        )
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % vocab_size
    name = type(module.transformers_model).__name__
    if differ(whole[:, :-1], module(changed)[:, :-1]):
        raise UsageError(f"model=transformers: {name}: not causal; tokens see later ones")
    if differ(whole, module.full_logits(tokens)):
        raise UsageError(
            f"model=transformers: {name}: not supported; its logits depend on more than the last "
            "hidden states"
        )
    documents = make_documents(((_FIRST, _SECOND),), torch.device("cpu"))
    packed = module(tokens, documents=documents)
    return not differ(packed[:, _FIRST:], module(tokens[:, _FIRST:]))


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether logits differ by more than rounding, or are not numbers."""
    return not bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())


@contextmanager
def quiet() -> Iterator[None]:
    """Draw from a generator of its own, without gradients."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def small_decoder(model: ModelConfig) -> tuple[TransformersDecoder, ModelConfig]:
    """Return a copy with one block of each kind on the meta device, and its configuration."""
    content = content_of(model)
    small = {name: min(size, content[name]) for name, size in _SHRUNK.items() if content.get(name)}
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
        built = dict(_cut(model, torch.device("cpu")).named_buffers())
        for name, buffer in module.named_buffers():
            if bool(buffer.isnan().any()):
                buffer.copy_(built[name])


def _check_buffers(module: TransformersDecoder, model: ModelConfig) -> None:
    """Check that `fill_buffers` gives the values that building the module gives, and use those.

    Raises:
        UsageError: If a buffer has other values, and is not read with the weights.
    """
    built = dict(_cut(model, torch.device("cpu")).named_buffers())
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
