"""Where the first values of adapters come from."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.base import Overlay
from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.peft import PeftAdapters
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensors import tensor_bytes
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import is_adapter
from fsdpctl.errors import UsageError
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.plan.layout import Span


class DrawnAdapters:
    """Adapters that are drawn when they are read, each from its name."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], draw: Callable[[str, Tensor], None]):
        self._shapes, self._draw = shapes, draw

    def __str__(self) -> str:
        return "adapters"

    def names(self, kind: str) -> list[str]:
        """Names of the weights."""
        return sorted(self._shapes) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a whole tensor."""
        name = key.removeprefix(tensor_key(PARAMETER, ""))
        return TensorInfo(list(self._shapes[name]), "F32")

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """The elements `span` of a flattened tensor."""
        info = self.info(key)
        span = span or Span(0, info.numel)
        whole = torch.empty(info.shape)
        self._draw(key.removeprefix(tensor_key(PARAMETER, "")), whole)
        yield span, tensor_bytes(whole.view(-1)[span.start : span.stop])


def first_weights(model: ModelConfig, module: nn.Module, seed: int, base: Tensors) -> Tensors:
    """What training begins with: the weights of `base`, and adapters where it has none.

    Args:
        model: its configuration.
        module: it, on whatever device; its parameters have their names and shapes.
        seed: of what is drawn.
        base: the weights in `model.path`.

    Raises:
        UsageError: the adapters in `model.lora.path` are not those of the model.
        CheckpointError: they are damaged.
    """
    if model.lora.rank is None:
        return base
    if any(map(is_adapter, base.names(PARAMETER))):
        if model.lora.path is not None:
            raise UsageError(f"model.lora.path={model.lora.path}: {base} has adapters already")
        return base
    params = module.named_parameters()
    shapes = {name: tuple(param.shape) for name, param in params if is_adapter(name)}
    if model.lora.path is not None:
        given = PeftAdapters(Path(model.lora.path))
        given.check(shapes)
        return Overlay(given, base)

    def draw(name: str, whole: Tensor) -> None:
        initialize_parameter(name, whole, seed=seed, config=model)

    return Overlay(DrawnAdapters(shapes, draw), base)


def weights_in_model_path(model: ModelConfig, module: nn.Module, seed: int) -> Tensors:
    """`first_weights` of the model in `model.path`."""
    return first_weights(model, module, seed, open_weights(model))
