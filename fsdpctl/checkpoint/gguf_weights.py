"""The weights in a GGUF file, which are dequantized a range at a time while they are read."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import modeling_gguf_pytorch_utils

from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, parameter_name
from fsdpctl.config.gguf_model import ROPE_FACTORS
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular, os_errors_as
from fsdpctl.io.gguf_header import GgufTensor, read_header
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.hub_names import stored_names
from fsdpctl.plan.layout import Span, round_up

_ELEMENTS_AT_ONCE = 1 << 18  # dequantization makes several copies
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_REORDERED = re.compile(r"\.attn_[qk]\.")  # heads that transformers reorders (llama architecture)


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """A tensor of the model, which is a range of rows of a tensor in the file."""

    tensor: GgufTensor
    shape: tuple[int, ...]  # the model's shape
    first_row: int
    head_rows: int  # rows that are reordered together; 1: none


class GgufTensors:
    """The weights in a GGUF file in float32, by transformers' names."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Find the model's weights; UsageError if names, shapes or dtypes do not match the file."""
        self.path, header = path, read_header(path)
        self._architecture = header.architecture
        # transformers ties the output head of Falcon, even if the file has one.
        tied = ["output.weight"] if self._architecture == "falcon" else []
        unused = header.tensors.keys() - {*ROPE_FACTORS, *tied}
        self._stored: dict[str, _StoredRows] = {}
        architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(architectures[self._architecture], model.num_layers)
        model_shapes = stored_names(build_base_model(model))
        experts = Counter(_EXPERT.sub(".experts.", name) for name in model_shapes)
        for name, shape in model_shapes.items():
            expert, stacked_name = _EXPERT.search(name), _EXPERT.sub(".experts.", name)
            gguf_name = names.get_name(stacked_name, (".weight", ".bias"))
            if gguf_name not in header.tensors:
                raise UsageError(f"{path}: {gguf_name or name}: not found")
            tensor = header.tensors[gguf_name]
            # In memory, transformers adds a first dimension to some tensors.
            stored_shape = shape[1:] if shape[0] == 1 else shape
            expected = (experts[stacked_name], *stored_shape) if expert else stored_shape
            if tensor.shape != expected:
                shapes = f"expected shape {list(expected)}, got {list(tensor.shape)}"
                raise UsageError(f"{path}: {gguf_name}: {shapes}")
            is_reordered = self._architecture == "llama" and _REORDERED.search(gguf_name)
            head_rows = model.used_head_dim if is_reordered else 1
            first_row = prod(stored_shape[:-1]) * int(expert[1]) if expert else 0
            self._stored[name] = _StoredRows(tensor, shape, first_row, head_rows)
            unused.discard(gguf_name)
        if unused:
            problem = f"not in transformers' model of {self._architecture}"
            raise UsageError(f"{path}: {min(unused)}: {problem}")
        for tensor in header.tensors.values():
            kind = gguf.GGMLQuantizationType(tensor.kind)
            try:  # whether gguf can dequantize this dtype
                gguf.dequantize(np.zeros((1, tensor.row_bytes), np.uint8), kind)
            except NotImplementedError:
                raise UsageError(f"{path}: {tensor.name}: {kind.name} not supported") from None

    def __str__(self) -> str:
        return str(self.path)

    def names(self, kind: str) -> list[str]:
        return sorted(self._stored) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        return TensorInfo(list(self._stored[parameter_name(key)].shape), "F32")

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        rows = self._stored[parameter_name(key)]
        width, span = rows.tensor.shape[-1], span or Span(0, prod(rows.shape))
        head_rows = rows.head_rows if len(rows.tensor.shape) > 1 else 1
        first_row = span.start // width // head_rows * head_rows
        stop_row = round_up(-(-span.stop // width), head_rows)
        step = round_up(-(-_ELEMENTS_AT_ONCE // width), head_rows)
        descriptor = open_regular(self.path, follow_links=True)
        with open(descriptor, "rb") as file, os_errors_as(self.path):
            for first in range(first_row, stop_row, step):
                stop = min(first + step, stop_row)
                row_span = Span(first * width, stop * width)
                if (requested := row_span.intersect(span)) is not None:
                    values = self._read_rows(file, rows, first, stop)
                    local = requested.shift(-row_span.start)
                    yield requested, values[local.start : local.stop].view(np.uint8).data

    def _read_rows(self, file: IO[Any], rows: _StoredRows, first: int, stop: int) -> NDArray[Any]:
        """Read rows and return their elements in the model's order."""
        tensor, num_bytes = rows.tensor, (stop - first) * rows.tensor.row_bytes
        file.seek(tensor.start + (rows.first_row + first) * tensor.row_bytes)
        data = np.fromfile(file, np.uint8, num_bytes)
        if len(data) < num_bytes:
            raise UsageError(f"{self.path}: truncated while it was read")
        kind = gguf.GGMLQuantizationType(tensor.kind)
        values = gguf.dequantize(data.reshape(stop - first, -1), kind)
        values = values if len(tensor.shape) > 1 else values[0]
        num_heads = len(values) // rows.head_rows  # heads in these rows, not in the model
        heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
        library: Any = modeling_gguf_pytorch_utils
        processor = library.TENSOR_PROCESSORS.get(self._architecture, library.TensorProcessor)
        processed = processor(config=heads).process(values, tensor.name)
        return np.ascontiguousarray(processed.weights).reshape(-1)
