"""The initial weights of a run: those in `model.path`, and adapters that they do not have."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, parameter_name
from fsdpctl.checkpoint.peft import PeftAdapters
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.source import Overlay, Tensors
from fsdpctl.checkpoint.tensors import tensor_bytes
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import is_adapter
from fsdpctl.errors import UsageError
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.plan.layout import Span


class InitialAdapters:
    """Adapters that are initialized when they are read, each by its name and the seed."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, seed: int
    ) -> None:
        self._shapes, self._model, self._seed = shapes, model, seed

    def __str__(self) -> str:
        return "adapters"

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of the adapters' weights."""
        return sorted(self._shapes) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        """Return the shape and dtype of a full tensor."""
        return TensorInfo(list(self._shapes[parameter_name(key)]), "F32")

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """Yield the elements `span` of a flattened tensor."""
        info = self.info(key)
        span = span or Span(0, info.numel)
        full = torch.empty(info.shape)
        initialize_parameter(parameter_name(key), full, seed=self._seed, config=self._model)
        yield span, tensor_bytes(full.view(-1)[span.start : span.stop])


def first_weights(model: ModelConfig, module: nn.Module, seed: int, base: Tensors) -> Tensors:
    """Return the weights that training starts from: `base`, plus adapters if it has none.

    Of `module`, only names and shapes are used. `seed` is that of the adapters' initial values.

    Raises:
        UsageError: If the adapters in `model.lora.path` do not match the model.
        CheckpointError: If they are corrupted.
    """
    if model.lora.rank is None:
        return base
    if any(map(is_adapter, base.names(PARAMETER))):
        if model.lora.path is not None:
            raise UsageError(f"model.lora.path={model.lora.path}: {base} already has adapters")
        return base
    params = module.named_parameters()
    shapes = {name: tuple(param.shape) for name, param in params if is_adapter(name)}
    if model.lora.path is None:
        return Overlay(InitialAdapters(shapes, model, seed), base)
    given = PeftAdapters(Path(model.lora.path))
    given.check(shapes)
    return Overlay(given, base)


def weights_in_model_path(model: ModelConfig, module: nn.Module, seed: int) -> Tensors:
    """Return `first_weights` of the model in `model.path`."""
    return first_weights(model, module, seed, open_weights(model))
