"""What of a model is trained: all of it, some parameters, or low-rank adapters beside its layers.

Adapters are those of Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, under the
names that PEFT gives them.
"""

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import LoraConfig, ModelConfig
from fsdpctl.config.peft import UP
from fsdpctl.errors import UsageError, nearest
from fsdpctl.models.gpt2 import Projection
from fsdpctl.models.parts import Head

ALL_LINEAR = "all_linear"


class LoraLinear(nn.Module):
    """A linear layer under its own names, and an adapter: W x + b + scale * B(A(dropout(x)))."""

    def __init__(self, base: nn.Linear | Projection, config: LoraConfig) -> None:
        """Take over the parameters of `base`."""
        super().__init__()
        assert config.rank is not None
        self.is_transposed = isinstance(base, Projection)
        self.weight = base.weight
        self.bias = base.bias
        self.scale = config.scale
        rows, columns = self.weight.shape
        width, out = (rows, columns) if self.is_transposed else (columns, rows)
        self.lora_dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.lora_A = _without_values(width, config.rank)
        self.lora_B = _without_values(config.rank, out)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., in) to (..., out)."""
        weight = self.weight.t() if self.is_transposed else self.weight
        added = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return torch.add(F.linear(x, weight, self.bias), added, alpha=self.scale)


def _without_values(width: int, out: int) -> nn.Linear:
    """A projection that is filled by name; nothing is drawn for it here."""
    made: nn.Linear = nn.utils.skip_init(nn.Linear, width, out, bias=False, device="meta")
    return made


def draw_adapter(name: str, whole: Tensor, generator: torch.Generator) -> None:
    """Fill an adapter's parameter: A uniformly up to 1 / sqrt(in), as PEFT; B with zeros."""
    if name.endswith(f".{UP}.weight"):
        whole.zero_()
        return
    bound = 1 / math.sqrt(whole.shape[1])
    values = torch.empty(whole.shape, dtype=torch.float32)
    whole.copy_(values.uniform_(-bound, bound, generator=generator))


def choose_trained(module: nn.Module, config: ModelConfig) -> None:
    """Add the adapters and freeze the parameters that `config` says, in place.

    Raises:
        UsageError: what is to be trained, or to get an adapter, is not there.
    """
    if config.lora.rank is None:
        _refuse_lora_without_rank(config.lora)
        if config.trainable is not None:
            _freeze_all_but(module, config.trainable)
        return
    if config.trainable is not None:
        raise UsageError(
            f"model.trainable={config.trainable}: not with model.lora.rank, which freezes "
            "everything but the adapters"
        )
    targets = _targets(module, config.lora.targets)
    module.requires_grad_(False)
    for name, base in targets:
        parent, _, key = name.rpartition(".")
        setattr(module.get_submodule(parent), key, LoraLinear(base, config.lora))


def _refuse_lora_without_rank(lora: LoraConfig) -> None:
    if lora != LoraConfig():
        raise UsageError("model.lora: say model.lora.rank=16, or another; without it there is none")


def _freeze_all_but(module: nn.Module, text: str) -> None:
    pattern = _pattern("model.trainable", text)
    names = [name for name, _ in module.named_parameters()]
    if not any(map(pattern.search, names)):
        words = {word for name in names for word in name.split(".")}
        raise UsageError(
            f"model.trainable={text}: is found in the name of no parameter{nearest(text, words)} "
            f"({names[0]} … {names[-1]})"
        )
    for name, param in module.named_parameters():
        param.requires_grad_(pattern.search(name) is not None)


def _targets(module: nn.Module, text: str) -> list[tuple[str, nn.Linear | Projection]]:
    """The layers that get an adapter, by name."""
    layers = dict(_linear_layers(module))
    if text == ALL_LINEAR:
        return list(layers.items())
    pattern = _pattern("model.lora.targets", text)
    found = [(name, layer) for name, layer in layers.items() if pattern.search(name)]
    if not found:
        refused = (n for n, each in module.named_modules() if n and pattern.search(n))
        what = next((n for n in refused if _has_matrix(module.get_submodule(n))), None)
        if what is not None:
            raise UsageError(
                f"model.lora.targets={text}: {what} gets no adapter; linear layers do, but for the "
                "output head"
            )
        leaves = dict.fromkeys(name.rpartition(".")[2] for name in layers)
        raise UsageError(
            f"model.lora.targets={text}: is found in the name of no linear layer"
            f"{nearest(text, leaves)} ({', '.join(leaves)})"
        )
    return found


def _has_matrix(module: nn.Module) -> bool:
    return isinstance(module, Head | nn.Embedding)


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear | Projection]]:
    """All but the output head: its adapter would change a tied embedding, once it is merged."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear | Projection) and not isinstance(each, Head):
            yield name, each


def _pattern(key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{key}={text}: no regular expression: {error}") from None
