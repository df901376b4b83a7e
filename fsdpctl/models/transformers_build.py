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

from fsdpctl.config.decoder_config import CONFIG_LOCATION, config_dict, read_hf_config
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.attention_kernels import TRANSFORMERS

_TRIED_WIDTH = 8  # hidden size of the norms that `_fused_class` runs
_fused_classes: dict[tuple[object, ...], type | None] = {}


def build_transformers(
    config: ModelConfig, *, transformers_norms: bool = False
) -> TransformersDecoder:
    """Build the module on the current device, usually meta; see `build_model.build_base_model`."""
    model = build_causal_lm(config)
    if not transformers_norms:
        fuse_norms(model)
    decoder = TransformersDecoder(model, config.router_aux_loss)
    decoder.attention.use(fsdpctl=config.attention != TRANSFORMERS)
    return decoder


def build_causal_lm(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    hf_config = read_hf_config(config_dict(config), CONFIG_LOCATION)
    try:
        auto_class: Any = transformers.AutoModelForCausalLM
        return auto_class.from_config(hf_config, dtype=dtype)
    except Exception as error:  # models may raise any exception
        reason = str(error).strip().replace("\n", " ")
        path = config.path
        location = CONFIG_LOCATION if path is None else f"model.path={path}: config.json"
        if isinstance(error, KeyError):  # such as an unknown activation
            value = str(error.args[0])
            known = did_you_mean(value, [*transformers.activations.ACT2FN])
            key = re.search(rf'(\w+)": "{re.escape(value)}"', hf_config.to_json_string())
            reason = f"{key[1] if key else 'unknown value'} {reason}: not known{known}"
        raise UsageError(f"{location}: transformers cannot build the model: {reason}") from None


@torch.no_grad()
def fill_buffers(module: TransformersDecoder) -> None:
    """Compute the values of buffers on the meta device, on the CPU.

    transformers computes buffers when it initializes the weights of their module or of a parent.
    Buffers that it does not compute are NaN until they are loaded with the weights.
    """
    owners = set()
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            unknown = math.nan if buffer.is_floating_point() else 0
            filled = torch.full_like(buffer, unknown, device="cpu")
            module.get_submodule(owner)._buffers[leaf] = filled
            owners |= {owner, ""}
            # All parents.
            owners |= {owner[:end] for end, letter in enumerate(owner) if letter == "."}
    model = module.transformers_model
    # Innermost first; the model last.
    for name in sorted(owners, key=lambda each: (-each.count("."), not each, each)):
        initialize = initializer(module, name)
        initialize(module.get_submodule(name) if name else model)


def initializer(module: TransformersDecoder, name: str) -> Callable[[nn.Module], None]:
    """Return the initialization function of the innermost PreTrainedModel around a submodule."""
    innermost: Any = module.transformers_model
    owner: nn.Module = module
    for key in filter(None, name.split(".")):
        owner = owner.get_submodule(key)
        if hasattr(owner, "_init_weights"):
            innermost = owner
    return innermost._init_weights  # type: ignore[no-any-return]  # transformers is untyped


@lru_cache(maxsize=1)
def _meta_module(config: ModelConfig) -> TransformersDecoder:
    with torch.device("meta"):
        return build_transformers(config)


@torch.no_grad()
def init_as_transformers(name: str, tensor: Tensor, seed: int, config: ModelConfig) -> None:
    """Initialize a parameter in place as transformers does, with a seed.

    The other parameters of its module stay on the meta device, so that their initialization draws
    nothing from the generator.
    """
    module = _meta_module(config)
    parent, _, leaf = name.rpartition(".")
    owner = copy.copy(module.get_submodule(parent))
    values = torch.zeros(tensor.shape, dtype=torch.float32)
    owner.__dict__["_parameters"] = {**owner._parameters, leaf: nn.Parameter(values)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initializer(module, parent)(owner)
    tensor.copy_(owner._parameters[leaf])  # type: ignore[arg-type]  # set above


class _FusedRmsNorm(nn.Module):
    """RMSNorm with torch's fused operator.

    transformers computes it with five operators, and saves two float32 results for backward. The
    fused operator saves its input, so that without recomputation a dense model needs 20% less
    memory for activations.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._parameters.get("weight"), _epsilon_of(self))


class _FusedRmsNormPlusOne(nn.Module):
    """RMSNorm with torch's fused operator, for weights that are stored minus one, as in Gemma."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1 + self.weight, _epsilon_of(self))


def fuse_norms(model: nn.Module) -> None:
    """Change the classes of norms in place to use torch's fused operator if the result is equal."""
    for each in model.modules():
        cls = type(each)
        if cls.__name__.endswith("RMSNorm"):
            flags = (value for value in vars(each).values() if isinstance(value, bool))
            key = (cls, *flags, *each._parameters)  # norms of one class may lack weights
            if key not in _fused_classes:
                _fused_classes[key] = _fused_class(each)
            each.__class__ = _fused_classes[key] or cls


def _epsilon_of(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _fused_class(norm: nn.Module) -> type | None:
    """Return a class for `norm` whose forward is the fused operator; None if results differ."""
    if not {*norm._parameters} <= {"weight"} or not isinstance(_epsilon_of(norm), float):
        return None
    cls = type(norm)
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_TRIED_WIDTH, generator=generator)
        x = torch.randn(2, 3, _TRIED_WIDTH, generator=generator)
        norm_copy = copy.copy(norm)
        norm_copy.__dict__["_parameters"] = {key: nn.Parameter(weight) for key in norm._parameters}
        try:
            expected = norm_copy(x)
        except Exception:  # forward requires other arguments
            return None
        # Without a weight, only the first class runs.
        for base in (_FusedRmsNorm, _FusedRmsNormPlusOne)[: 1 + len(norm._parameters)]:
            fused = type(cls.__name__, (base, cls), {"__module__": cls.__module__})
            norm_copy.__class__ = fused
            if isinstance(expected, Tensor) and torch.allclose(norm_copy(x), expected, atol=1e-6):
                return fused
    return None
