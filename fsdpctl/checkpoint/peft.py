"""Adapters in the format of the PEFT library: a directory with two files."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.checksums import Checksums
from fsdpctl.checkpoint.manifest import PARAMETER, tensor_key
from fsdpctl.checkpoint.pretrained import whole_weights
from fsdpctl.checkpoint.publish import WRITTEN, new_export
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import FileTensors
from fsdpctl.checkpoint.tensor_file import TensorEntry, open_tensor_file, write_synced
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    OF_EXPERTS,
    PREFIX,
    adapted_layers,
    adapted_weight,
    is_adapter,
    names_in_peft,
)
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.errors import UsageError
from fsdpctl.models.products import transposed_layers
from fsdpctl.models.registry import build_model, build_plain
from fsdpctl.models.stacked_experts import stacked_experts

# The ends of names that PEFT converts for models with experts (transformers' conversion tables).
_RENAMED = (".down_proj", ".gate_proj", ".up_proj", ".gate")


class PeftAdapters(FileTensors):
    """The adapters in a PEFT directory, under fsdpctl's names."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        """Read the header; `names` are those of the model's adapters, in its order."""
        path = folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise UsageError(f"model.lora.path={folder}: {ADAPTER_WEIGHTS} not found")
        file = open_tensor_file(path)
        ours = {theirs: name for name, theirs in names_in_peft(names).items()}
        entries = file.entries.items()
        found = {ours.get(x) or _model_name(x, folder): (file, entry) for x, entry in entries}
        super().__init__(folder, found)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse adapters that are not those of a model, by name and shape."""
        where = f"model.lora.path={self.folder}"
        for name, shape in shapes.items():
            if name not in self._found:
                there = [each.replace(OF_EXPERTS, ".") for each in adapted_layers(self._found)]
                layers = {each.rpartition(".")[2] for each in there}
                is_stacked = any(OF_EXPERTS in each for each in (*self._found, *shapes))
                if is_stacked or any(f".{layer}.lora_" in name for layer in layers):
                    layers = set(there)  # of some blocks only, or of layers called alike
                raise UsageError(
                    f"{where}: {name} not found; model.lora.targets requires it; set "
                    f"model.lora.targets={','.join(sorted(layers))}, the layers in the file"
                )
            found = self._found[name][1].shape
            if found != shape:
                raise UsageError(
                    f"{where}: {name}: expected shape {list(shape)}, got {list(found)}"
                )
        for name in self._found:
            if name not in shapes:
                raise UsageError(
                    f"{where}: unexpected {name}; check that the adapters are of this model and "
                    "that model.lora.targets includes their layers"
                )


def _model_name(name: str, folder: Path) -> str:
    if not re.fullmatch(re.escape(PREFIX) + r".+\.lora_[AB]\.weight", name):
        raise UsageError(
            f"model.lora.path={folder}: {name}: expected lora_A.weight or lora_B.weight of a "
            "linear layer; DoRA, biases, embeddings and modules_to_save are not supported"
        )
    return name.removeprefix(PREFIX)


def write_peft(reader: CheckpointReader, destination: Path, *, overwrite: bool = False) -> int:
    """Write the adapters of a checkpoint to a directory that `peft` opens; return their bytes."""
    destination = destination.resolve()
    weights = whole_weights(reader)
    names = weights.names(PARAMETER)
    if not any(map(is_adapter, names)):
        raise UsageError(f"--format peft: {reader} has no adapters")
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    adapters = [name for name, _ in build_model(model).named_parameters() if is_adapter(name)]
    ours = {theirs: name for name, theirs in names_in_peft(adapters).items()}
    infos = {name: weights.info(tensor_key(PARAMETER, ours[name])) for name in sorted(ours)}
    entries = [TensorEntry(name, info.dtype, tuple(info.shape)) for name, info in infos.items()]

    def read(entry: TensorEntry) -> Iterator[memoryview]:
        return (data for _, data in weights.read(tensor_key(PARAMETER, ours[entry.name])))

    base = None if reader.manifest.base is None else reader.manifest.base.path
    with new_export(destination, reader.folder, overwrite=overwrite) as folder:
        checksums, metadata = Checksums(), {"format": "pt", **WRITTEN}
        checksums.write_tensors(folder / ADAPTER_WEIGHTS, entries, metadata, read)
        plain = build_plain(model)
        linear = [each for each in adapted_layers(names) if OF_EXPERTS not in each]
        is_transposed = not transposed_layers(plain).isdisjoint(linear)
        has_stacks = any(True for _ in stacked_experts(plain))
        renamed = {each for each in linear if has_stacks and each.endswith(_RENAMED)}
        content = _adapter_config(model, names, renamed, base, is_transposed=is_transposed)
        write_synced(folder / ADAPTER_CONFIG, content)
        checksums.write(folder)
    return sum(entry.nbytes for entry in entries)


def _targets(names: list[str]) -> list[str]:
    """Return the layers with adapters, by the last part of their names if that is unambiguous."""
    layers = [each for each in adapted_layers(names) if OF_EXPERTS not in each]
    ends = {layer.rpartition(".")[2] for layer in layers}
    bases = (name.removesuffix(".weight") for name in names if not is_adapter(name))
    alike = {base for base in bases if base.rpartition(".")[2] in ends}
    return sorted(ends) if alike <= set(layers) else layers


def _adapter_config(
    model: ModelConfig,
    names: list[str],
    renamed: Collection[str],
    base: str | None,
    *,
    is_transposed: bool,
) -> bytes:
    """Return the contents of adapter_config.json; `base`: the weights that were adapted.

    PEFT takes the layers `renamed` for matrices of experts, unless it gets their parameters; those
    have no dropout there.
    """
    ends = tuple(f"{each}." for each in renamed)
    targets = _targets([each for each in names if not each.startswith(ends)])
    adapted = adapted_layers(names)
    stacked = [adapted_weight(x) for x in adapted if OF_EXPERTS in x or x in renamed]
    lora = model.lora
    assert lora.rank is not None
    alpha = lora.used_alpha
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0 if stacked else lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "target_modules": targets,
        "target_parameters": stacked or None,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    return (json.dumps(content, indent=2) + "\n").encode()
