"""Where the first values of adapters come from, and what becomes of them: they are merged."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.base import Overlay
from fsdpctl.checkpoint.cast import FLOATS, cast
from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.peft import PeftAdapters
from fsdpctl.checkpoint.pretrained import open_weights, whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.checkpoint.tensors import tensor_bytes, tensor_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.errors import UsageError
from fsdpctl.models.lora import DOWN, UP, adapted_layers, is_adapter
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
    if model.lora.rank is None or any(map(is_adapter, base.names(PARAMETER))):
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


class MergedWeights:
    """Weights with their adapters added to them: W + scale * B A, in float32, rounded once."""

    def __init__(self, weights: Tensors, model: ModelConfig, dtype: str | None = None) -> None:
        """Merge while they are read.

        Args:
            weights: with adapters.
            model: whose they are.
            dtype: safetensors' name of what merged weights become; None: what they were.
        """
        self._weights = weights
        self._scale = model.lora.scale
        self._is_transposed = model.architecture == "gpt2"
        self._dtype = dtype
        self._last: tuple[str, tuple[Tensor, Tensor]] | None = None
        self._merged = {f"{name}.weight" for name in adapted_layers(weights.names(PARAMETER))}

    def __str__(self) -> str:
        return str(self._weights)

    def names(self, kind: str) -> list[str]:
        """Of all that are no adapters."""
        return [name for name in self._weights.names(kind) if not is_adapter(name)]

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a whole tensor."""
        info = self._weights.info(key)
        if self._dtype is None or info.dtype not in FLOATS or self._name(key) not in self._merged:
            return info
        return TensorInfo(info.shape, self._dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """The elements `span` of a flattened tensor, a chunk at a time."""
        name, info = self._name(key), self.info(key)
        if name not in self._merged:
            yield from self._weights.read(key, span)
            return
        stored, (_, columns) = self._weights.info(key).dtype, info.shape
        layer = name.removesuffix(".weight")
        left, right = self._factors(layer)
        for within, data in self._weights.read(key, span):
            values = tensor_of(memoryview(bytearray(cast(data, stored, "F32", name))), "F32")
            first, stop = within.start // columns, -(-within.stop // columns)
            added = (left[first:stop] @ right).reshape(-1)
            offset = within.start - first * columns
            values += self._scale * added[offset : offset + within.numel]
            yield within, cast(tensor_bytes(values), "F32", info.dtype, name)

    @staticmethod
    def _name(key: str) -> str:
        return key.removeprefix(tensor_key(PARAMETER, ""))

    def _factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """Whose product is added to a layer's weight; those of the last layer stay."""
        if self._last is None or self._last[0] != layer:
            down, up = self._whole(f"{layer}.{DOWN}.weight"), self._whole(f"{layer}.{UP}.weight")
            self._last = (layer, (down.t(), up.t()) if self._is_transposed else (up, down))
        return self._last[1]

    def _whole(self, name: str) -> Tensor:
        """An adapter's matrix in float32."""
        key = tensor_key(PARAMETER, name)
        info = self._weights.info(key)
        parts = [
            tensor_of(memoryview(bytearray(cast(data, info.dtype, "F32", name))), "F32")
            for _, data in self._weights.read(key)
        ]
        return torch.cat(parts).view(info.shape)


def weights_in_model_path(model: ModelConfig, module: nn.Module, seed: int) -> Tensors:
    """`first_weights` of the model in `model.path`."""
    return first_weights(model, module, seed, open_weights(model))


def exported_weights(reader: CheckpointReader, dtype: str | None, *, merges: bool) -> Tensors:
    """The whole weights of a checkpoint as others read them: without adapters.

    Args:
        reader: of the checkpoint.
        dtype: safetensors' name of what merged weights are rounded to; None: what they were.
        merges: add adapters to the weights that they are of.

    Raises:
        UsageError: there are adapters that are not to be merged, or the other way round.
    """
    weights = whole_weights(reader)
    has_adapters = any(map(is_adapter, weights.names(PARAMETER)))
    if has_adapters and not merges:
        raise UsageError(
            f"{reader}: has adapters: --merge adds them to the weights, and --format peft writes "
            "them alone"
        )
    if merges and not has_adapters:
        raise UsageError(f"--merge: {reader} has no adapters")
    if not merges:
        return weights
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    return MergedWeights(weights, model, dtype)
