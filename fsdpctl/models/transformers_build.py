"""Modules and initial weights of decoders that transformers implements."""

import copy
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.decoder_config import CONFIG_LOCATION, config_dict, read_configuration
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.attention_kernels import TRANSFORMERS

_TRIED_WIDTH = 8  # of the norms that are tried
_fused_classes: dict[tuple[object, ...], type | None] = {}


def build_transformers(
    config: ModelConfig, *, transformers_norms: bool = False
) -> TransformersDecoder:
    """Build the module on the current device, which is usually meta; see `build_plain`."""
    model = build_causal_lm(config)
    if not transformers_norms:
        fuse_norms(model)
    decoder = TransformersDecoder(model, config.router_aux_loss)
    decoder.attention.use(ours=config.attention != TRANSFORMERS)
    return decoder


def build_causal_lm(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    told = read_configuration(config_dict(config), CONFIG_LOCATION)
    try:
        make: Any = transformers.AutoModelForCausalLM
        return make.from_config(told, dtype=dtype)
    except Exception as error:  # the code of a family raises what it likes
        reason = str(error).strip().replace("\n", " ")
        where = CONFIG_LOCATION if config.path is None else f"model.path={config.path}: config.json"
        if isinstance(error, KeyError):  # of a table of activations, for example
            known = did_you_mean(str(error.args[0]), [*transformers.activations.ACT2FN])
            key = re.search(rf'(\w+)": "{re.escape(str(error.args[0]))}"', told.to_json_string())
            reason = f"{key[1] if key else 'unknown value'} {reason}: not known{known}"
        raise UsageError(f"{where}: transformers cannot build the model: {reason}") from None


@torch.no_grad()
def fill_buffers(module: TransformersDecoder) -> None:
    """Replace buffers on the meta device by their values, on the CPU.

    transformers computes them where it initializes the weights of their module, or of one above.
    Others are NaN, until they are read with the weights.
    """
    above = set()
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            unknown = math.nan if buffer.is_floating_point() else 0
            filled = torch.full_like(buffer, unknown, device="cpu")
            module.get_submodule(owner)._buffers[leaf] = filled
            above |= {owner[:end] for end, letter in enumerate(owner) if letter == "."}
            above |= {owner, ""}
    model = module.transformers_model
    for name in sorted(above, key=lambda each: (-each.count("."), not each, each)):
        initialize = initializer(module, name)
        initialize(module.get_submodule(name) if name else model)


def initializer(module: TransformersDecoder, name: str) -> Callable[[nn.Module], None]:
    """Return what initializes a submodule: that of the innermost of transformers' models."""
    innermost: Any = module.transformers_model
    owner: nn.Module = module
    for word in filter(None, name.split(".")):
        owner = owner.get_submodule(word)
        if hasattr(owner, "_init_weights"):
            innermost = owner
    return innermost._init_weights  # type: ignore[no-any-return]  # transformers'


@lru_cache(maxsize=1)
def _meta_module(config: ModelConfig) -> TransformersDecoder:
    with torch.device("meta"):
        return build_transformers(config)


@torch.no_grad()
def init_as_transformers(name: str, whole: Tensor, number: int, config: ModelConfig) -> None:
    """Initialize a parameter in place as transformers does, with the seed `number`.

    Only this parameter of its module has memory, so that nothing else takes from the generator.
    """
    module = _meta_module(config)
    parent, _, leaf = name.rpartition(".")
    owner = copy.copy(module.get_submodule(parent))
    values = torch.zeros(whole.shape, dtype=torch.float32)
    owner.__dict__["_parameters"] = {**owner._parameters, leaf: nn.Parameter(values)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        initializer(module, parent)(owner)
    whole.copy_(owner._parameters[leaf])  # type: ignore[arg-type]  # set above


class _FusedRmsNorm(nn.Module):
    """The forward of norms that scale each vector to unit root mean square, by torch's operator.

    transformers computes them in five operators, and keeps two results in float32 for backward.
    Torch's keeps its input: without recomputation, a dense model needs a fifth less memory for
    activations.
    """

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self
        return F.rms_norm(x, (x.shape[-1],), norm._parameters.get("weight"), _epsilon_of(norm))


class _FusedRmsNormPlusOne(nn.Module):
    """The same for norms that store their weights less one, as Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self
        return F.rms_norm(x, (x.shape[-1],), 1 + norm.weight, _epsilon_of(norm))


def fuse_norms(model: nn.Module) -> None:
    """Let the norms of `model`, the same objects, compute by torch's operator if that is equal."""
    for each in model.modules():
        kind = type(each)
        if kind.__name__.endswith("RMSNorm"):
            flags = (value for value in vars(each).values() if isinstance(value, bool))
            like = (kind, *flags, *each._parameters)  # a class may have norms without weights
            if like not in _fused_classes:
                _fused_classes[like] = _fused_class(each)
            each.__class__ = _fused_classes[like] or kind


def _epsilon_of(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _fused_class(norm: nn.Module) -> type | None:
    """Return a class for norms like `norm` whose forward is the operator; None: another result."""
    if not {*norm._parameters} <= {"weight"} or not isinstance(_epsilon_of(norm), float):
        return None
    kind = type(norm)
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(*n, _TRIED_WIDTH, generator=generator) for n in ((), (2, 3)))
        tried = copy.copy(norm)
        tried.__dict__["_parameters"] = {name: nn.Parameter(weight) for name in norm._parameters}
        try:
            expected = tried(x)
        except Exception:  # it needs more than hidden states
            return None
        for base in (_FusedRmsNorm, _FusedRmsNormPlusOne)[: 1 + len(norm._parameters)]:
            made = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
            tried.__class__ = made
            if isinstance(expected, Tensor) and torch.allclose(tried(x), expected, atol=1e-6):
                return made
    return None
