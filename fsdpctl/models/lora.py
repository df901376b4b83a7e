"""The trained part of a model: all of it, some parameters, or low-rank adapters of its layers.

The adapters are those of Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, with
the parameter names of PEFT.
"""

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fsdpctl.config.model import LoraConfig, ModelConfig
from fsdpctl.config.peft import UP
from fsdpctl.errors import UsageError, nearest
from fsdpctl.models.quantized import PACKINGS, FrozenLinear

ALL_LINEAR = "all_linear"
Linear = nn.Module  # torch's, that of GPT-2, or a FrozenLinear


class LoraLinear(FrozenLinear):
    """A linear layer with its own names and an adapter: W x + b + scale * B(A(dropout(x)))."""

    def __init__(self, base: Linear, config: LoraConfig) -> None:
        """Take over the parameters of `base`."""
        super().__init__(base, is_transposed=_is_transposed(base))
        assert config.rank is not None
        self.scale = config.scale
        rows, columns = self.rows, self.columns
        width, out = (rows, columns) if self.is_transposed else (columns, rows)
        self.lora_dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.lora_A = _without_values(width, config.rank)
        self.lora_B = _without_values(config.rank, out)

    def forward(self, x: Tensor) -> Tensor:
        """Project from shape (..., in) to (..., out)."""
        added = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return torch.add(super().forward(x), added, alpha=self.scale)


def _is_transposed(base: Linear) -> bool:
    return base.is_transposed if isinstance(base, FrozenLinear) else _is_projection(base)


def _is_projection(layer: nn.Module) -> bool:
    """Return whether a layer is that of GPT-2, whose weight has the shape (in, out)."""
    about = type(layer)
    return (about.__module__, about.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _without_values(width: int, out: int) -> nn.Linear:
    """Return an uninitialized projection, which is initialized by name later."""
    made: nn.Linear = nn.utils.skip_init(nn.Linear, width, out, bias=False, device="meta")
    return made


def draw_adapter(name: str, whole: Tensor, generator: torch.Generator) -> None:
    """Initialize an adapter: A uniformly up to 1 / sqrt(in), as in PEFT, and B with zeros."""
    if name.endswith(f".{UP}.weight"):
        whole.zero_()
        return
    bound = 1 / math.sqrt(whole.shape[1])
    values = torch.empty(whole.shape, dtype=torch.float32)
    whole.copy_(values.uniform_(-bound, bound, generator=generator))


def choose_trained(module: nn.Module, config: ModelConfig) -> None:
    """Add adapters and freeze parameters by `config`, in place.

    Raises:
        UsageError: If no parameter or layer matches, or the settings conflict.
    """
    if config.lora.rank is None:
        if config.base_dtype is not None:
            raise UsageError(
                f"model.base_dtype={config.base_dtype}: only valid with adapters; set "
                "model.lora.rank=16, or another one"
            )
        if config.lora != LoraConfig():
            raise UsageError("model.lora: requires a rank; set model.lora.rank=16, or another one")
        if config.trainable is not None:
            _freeze_all_but(module, config.trainable)
        return
    if config.trainable is not None:
        raise UsageError(
            f"model.trainable={config.trainable}: conflicts with model.lora.rank, which trains "
            "only the adapters"
        )
    if config.base_dtype is not None:
        for name, base in list(_linear_layers(module)):
            frozen = FrozenLinear(base, is_transposed=_is_transposed(base))
            frozen.quantize(PACKINGS[config.base_dtype])
            _replace(module, name, frozen)
    targets = _targets(module, config.lora.targets)
    module.requires_grad_(False)
    for name, base in targets:
        _replace(module, name, LoraLinear(base, config.lora))


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(module.get_submodule(parent), key, layer)


def _freeze_all_but(module: nn.Module, text: str) -> None:
    pattern = _pattern("model.trainable", text)
    names = [name for name, _ in module.named_parameters()]
    if not any(map(pattern.search, names)):
        words = {word for name in names for word in name.split(".")}
        raise UsageError(
            f"model.trainable={text}: matches no parameter name{nearest(text, words)}; names are "
            f"{names[0]} … {names[-1]}"
        )
    for name, param in module.named_parameters():
        param.requires_grad_(pattern.search(name) is not None)


def _targets(module: nn.Module, text: str) -> list[tuple[str, Linear]]:
    """Return the layers that get an adapter, with their names."""
    layers = dict(_linear_layers(module))
    if text == ALL_LINEAR:
        return list(layers.items())
    pattern = _pattern("model.lora.targets", text)
    found = [(name, layer) for name, layer in layers.items() if pattern.search(name)]
    if not found:
        leaves = dict.fromkeys(name.rpartition(".")[2] for name in layers)
        raise UsageError(
            f"model.lora.targets={text}: matches no linear layer{nearest(text, leaves)}; linear "
            f"layers except the output head are {', '.join(leaves)}"
        )
    return found


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield all but the output head: merging its adapter would change a tied embedding.

    Subclasses of torch's layer, such as routers of transformers, may return more than a product.
    """
    for name, each in module.named_modules():
        if type(each) in (nn.Linear, FrozenLinear) or _is_projection(each):
            yield name, each


def _pattern(key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{key}={text}: not a regular expression: {error}") from None
