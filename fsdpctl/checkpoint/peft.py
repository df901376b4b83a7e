"""Adapters as the library PEFT keeps them: a directory with two files."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.cast import FLOATS
from fsdpctl.checkpoint.destination import WRITTEN, new_folder
from fsdpctl.checkpoint.manifest import PARAMETER, TensorInfo, tensor_key
from fsdpctl.checkpoint.pretrained import whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import (
    ITEMSIZES,
    TensorEntry,
    make_header,
    open_tensor_file,
    write_synced,
    write_tensor_file,
)
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import ADAPTER_CONFIG, adapted_layers, is_adapter
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.plan.layout import Span

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the names of tensors there
_OTHERS = {  # what tensors are called that are no low-rank matrices of a linear layer
    "lora_magnitude_vector": "DoRA",
    "lora_B.bias": "lora_bias",
    "lora_embedding": "an embedding",
}


class PeftAdapters:
    """The adapters in a PEFT directory, under our names."""

    def __init__(self, folder: Path) -> None:
        """Read the header.

        Raises:
            UsageError: there are none, or of a kind that is not offered.
            CheckpointError: the file is damaged.
        """
        path = folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise UsageError(f"model.lora.path={folder}: there is no {ADAPTER_WEIGHTS} in it")
        self._folder, self._file = folder, open_tensor_file(path)
        self._found: dict[str, TensorEntry] = {}
        for name, entry in self._file.entries.items():
            self._found[_our_name(name, folder)] = entry

    def __str__(self) -> str:
        return str(self._folder)

    def names(self, kind: str) -> list[str]:
        """Names of the weights."""
        return sorted(self._found) if kind == PARAMETER else []

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a whole tensor."""
        entry = self._found[key.removeprefix(tensor_key(PARAMETER, ""))]
        if entry.dtype not in FLOATS:
            raise CheckpointError(f"{self._file.path}: {entry.name} is {entry.dtype}, no float")
        return TensorInfo(list(entry.shape), entry.dtype)

    def read(self, key: str, span: Span | None = None) -> Iterator[tuple[Span, memoryview]]:
        """The elements `span` of a flattened tensor, a chunk at a time."""
        entry = self._found[key.removeprefix(tensor_key(PARAMETER, ""))]
        size = ITEMSIZES[entry.dtype]
        span = span or Span(0, entry.nbytes // size)
        start = span.start
        for data in self._file.chunks(entry, span.start * size, span.stop * size):
            yield Span(start, start + len(data) // size), data
            start += len(data) // size

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See that they are the adapters of a model, by name and shape.

        Raises:
            UsageError: one is missing, too much, or of another shape.
        """
        where = f"model.lora.path={self._folder}"
        for name, shape in shapes.items():
            if name not in self._found:
                raise UsageError(
                    f"{where}: there is no {name} in it, which model.lora.targets asks for"
                )
            if self._found[name].shape != shape:
                found = list(self._found[name].shape)
                raise UsageError(f"{where}: {name} is {found}, the model's is {list(shape)}")
        for name in self._found:
            if name not in shapes:
                raise UsageError(
                    f"{where}: the model has no {name}; is it of another one, or does "
                    "model.lora.targets leave it out?"
                )


def _our_name(name: str, folder: Path) -> str:
    where = f"model.lora.path={folder}"
    for part, what in _OTHERS.items():
        if part in name:
            raise UsageError(f"{where}: {name} is of {what}, which is not offered")
    if not re.fullmatch(re.escape(_PREFIX) + r".+\.lora_[AB]\.weight", name):
        raise UsageError(
            f"{where}: {name} is no adapter of a linear layer; weights that were trained whole "
            "(modules_to_save) are not offered"
        )
    return name.removeprefix(_PREFIX)


def write_peft(
    reader: CheckpointReader,
    destination: Path,
    *,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Write the adapters of a checkpoint to a directory that `peft` opens; returns their bytes.

    Args:
        reader: the checkpoint.
        destination: a directory that does not exist yet.
        overwrite: replace an earlier export.
        on_bytes: called with the bytes read since the last call.

    Raises:
        UsageError: the destination exists, or there are no adapters.
        CheckpointError: a checksum does not match.
    """
    destination = destination.resolve()
    weights = whole_weights(reader)
    names = [name for name in weights.names(PARAMETER) if is_adapter(name)]
    if not names:
        raise UsageError(f"--format peft: {reader} has no adapters")
    keys = [tensor_key(PARAMETER, name) for name in names]
    infos = [weights.info(key) for key in keys]
    entries = [
        TensorEntry(_PREFIX + name, info.dtype, tuple(info.shape))
        for name, info in zip(names, infos, strict=True)
    ]

    def chunks() -> Iterator[memoryview]:
        for key in keys:
            for _, data in weights.read(key):
                yield data
                on_bytes(len(data))

    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    base = None if reader.manifest.base is None else reader.manifest.base.path
    with new_folder(destination, reader.folder, overwrite=overwrite) as folder:
        header = make_header(entries, {"format": "pt", **WRITTEN})
        write_tensor_file(folder / ADAPTER_WEIGHTS, header, chunks())
        content = _adapter_config(model, _targets(weights.names(PARAMETER)), base)
        write_synced(folder / ADAPTER_CONFIG, content)
    return sum(entry.nbytes for entry in entries)


def _targets(names: list[str]) -> list[str]:
    """The layers with adapters, by the last part of their names if that means no others."""
    layers = adapted_layers(names)
    ends = {layer.rpartition(".")[2] for layer in layers}
    bases = (name.removesuffix(".weight") for name in names if not is_adapter(name))
    alike = {base for base in bases if base.rpartition(".")[2] in ends}
    return sorted(ends) if alike <= set(layers) else layers


def _adapter_config(model: ModelConfig, targets: list[str], base: str | None) -> bytes:
    """The contents of adapter_config.json.

    Args:
        model: whose adapters they are.
        targets: names, or ends of names, of the layers that have one.
        base: the path of the weights that they were trained on.
    """
    lora = model.lora
    assert lora.rank is not None
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": model.architecture == "gpt2",
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    return (json.dumps(content, indent=2) + "\n").encode()
