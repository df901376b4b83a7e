"""Adapters in the format of the PEFT library: a directory with two files."""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from fsdpctl.checkpoint.checksums import ChecksumWriter
from fsdpctl.checkpoint.manifest import MODEL_CONFIG_FILES, PARAMETER, tensor_key
from fsdpctl.checkpoint.pretrained import read_attachments, with_base
from fsdpctl.checkpoint.publish import EXPORT_METADATA, export_directory, write_assets
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_file import TensorEntry, TensorFile, open_tensor_file, write_synced
from fsdpctl.checkpoint.tensor_source import FileTensors
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.errors import UsageError
from fsdpctl.io.texts import hub_name
from fsdpctl.models.adapter_names import (
    EXPERT_ADAPTERS,
    PEFT_PREFIX,
    adapted_layers,
    adapted_weight,
    is_adapter_name,
    peft_names,
)
from fsdpctl.models.build_model import build_base_model, build_model
from fsdpctl.models.hub_names import tied_names
from fsdpctl.models.linear_layers import transposed_layers
from fsdpctl.models.stacked_experts import named_experts

# Ends of names of tensors that PEFT writes for modules_to_save if embeddings were resized: a second
# copy of the trained tensor, and the tensor that it replaces. Neither is read.
_RESIZED_COPIES = (".modules_to_save.weight", ".original_module.weight")
# Ends of names of layers that PEFT renames to matrices of stacked experts when it loads adapters,
# by transformers' conversion tables for mixture-of-experts models. So other layers
# with these ends (a dense MLP, a router) are `target_parameters`, which PEFT does not rename.
_RENAMED = (".down_proj", ".gate_proj", ".up_proj", ".gate")


class PeftAdapters(FileTensors):
    """The adapters and modules_to_save in a PEFT directory, under the model's names."""

    def __init__(self, folder: Path, module: nn.Module) -> None:
        """Read the header of the file; `module` is the model with its adapters."""
        path = folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise UsageError(f"model.lora.path={folder}: {ADAPTER_WEIGHTS} not found")
        file = open_tensor_file(path)
        self._shapes = trained_shapes(module)
        by_peft_name = {peft_name: name for name, peft_name in peft_names(self._shapes).items()}
        param_names, tied_to = {name for name, _ in module.named_parameters()}, tied_names(module)
        entries: dict[str, tuple[TensorFile, TensorEntry]] = {}
        for peft_name, entry in file.entries.items():
            if not peft_name.endswith(_RESIZED_COPIES):
                name = by_peft_name.get(peft_name) or peft_name.removeprefix(PEFT_PREFIX)
                name = name if name in param_names else tied_to.get(name, name)
                if name not in param_names or not peft_name.startswith(PEFT_PREFIX):
                    _check_name(peft_name, folder)
                entries.setdefault(name, (file, entry))  # the first of tied tensors counts
        super().__init__(folder, entries)

    def check(self) -> None:
        """Check names and shapes; UsageError if they do not match the model's adapters."""
        location, shapes = f"model.lora.path={self.folder}", self._shapes
        for name, shape in shapes.items():
            if name not in self._entries:
                if not is_adapter_name(name):
                    raise UsageError(f"{location}: {name} not found; model.lora.also requires it")
                adapted = [x.replace(EXPERT_ADAPTERS, ".") for x in adapted_layers(self._entries)]
                layers = {each.rpartition(".")[2] for each in adapted}
                is_stacked = any(EXPERT_ADAPTERS in each for each in (*self._entries, *shapes))
                if is_stacked or any(f".{layer}.lora_" in name for layer in layers):
                    # Only some of the layers with this ending are adapted: list full names.
                    layers = set(adapted)
                raise UsageError(
                    f"{location}: {name} not found; model.lora.targets requires it; set "
                    f"model.lora.targets={','.join(sorted(layers))}, the layers in the file"
                )
            if (stored := self._entries[name][1].shape) != shape:
                shapes_text = f"expected shape {list(shape)}, got {list(stored)}"
                raise UsageError(f"{location}: {name}: {shapes_text}")
        for name in (each for each in self._entries if each not in shapes):
            if is_adapter_name(name):
                raise UsageError(
                    f"{location}: unexpected {name}; check that the adapters are of this model and "
                    "that model.lora.targets includes their layers"
                )
            fully_trained = {x.rpartition(".")[0] for x in self._entries if not is_adapter_name(x)}
            raise UsageError(
                f"{location}: {name}: not trained by this run; to train it too, set "
                f"model.lora.also={','.join(sorted(fully_trained))}"
            )


def stored_rows(folder: Path, names: Collection[str]) -> dict[str, int]:
    """Return the number of rows of each of the parameters `names` that a PEFT directory has."""
    path = folder / ADAPTER_WEIGHTS
    entries = open_tensor_file(path).entries if path.is_file() else {}
    pairs = ((name, entries.get(PEFT_PREFIX + name)) for name in names)
    return {name: entry.shape[0] for name, entry in pairs if entry is not None and entry.shape}


def trained_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained parameters, by name."""
    params = module.named_parameters()
    return {name: tuple(param.shape) for name, param in params if param.requires_grad}


def _check_name(name: str, folder: Path) -> None:
    if not re.fullmatch(re.escape(PEFT_PREFIX) + r".+\.lora_[AB]\.weight", name):
        raise UsageError(
            f"model.lora.path={folder}: {name}: expected lora_A.weight or lora_B.weight of a "
            "linear layer, or a parameter of the model; DoRA, biases and adapters of embeddings "
            "are not supported"
        )


def write_peft(
    reader: CheckpointReader, destination: Path, *, overwrite: bool = False, names_base: bool = True
) -> int:
    """Write the adapters of a checkpoint to a directory that PEFT can load; return their bytes.

    If `names_base`, adapter_config.json names the base even if it is a local directory.
    """
    destination = destination.resolve()
    weights = with_base(reader)
    names = weights.names(PARAMETER)
    if not any(map(is_adapter_name, names)):
        raise UsageError(f"--format peft: {reader} has no adapters")
    model = config_of_checkpoint(reader.manifest.config, str(reader)).model
    module = build_model(model)
    trained = trained_shapes(module)
    by_peft_name = {peft_name: name for name, peft_name in peft_names(trained).items()}
    fully_trained = [name for name in trained if not is_adapter_name(name)]
    ties = {other: name for other, name in tied_names(module).items() if name in fully_trained}
    by_peft_name |= {PEFT_PREFIX + other: name for other, name in ties.items()}
    keys = {name: tensor_key(PARAMETER, by_peft_name[name]) for name in sorted(by_peft_name)}
    infos = {name: weights.info(key) for name, key in keys.items()}
    entries = [TensorEntry(name, info.dtype, tuple(info.shape)) for name, info in infos.items()]

    def read(entry: TensorEntry) -> Iterator[memoryview]:
        return (data for _, data in weights.read(keys[entry.name]))

    path = "" if reader.manifest.base is None else reader.manifest.base.path
    on_hub = hub_name(path)
    base = on_hub[0] if on_hub else (names_base and path) or None
    with export_directory(destination, reader.folder, overwrite=overwrite) as folder:
        checksums, metadata = ChecksumWriter(), {"format": "pt", **EXPORT_METADATA}
        checksums.write_tensors(folder / ADAPTER_WEIGHTS, entries, metadata, read)
        content = _adapter_config(model, names, base)
        saved = {x.rpartition(".")[0] for x in (*fully_trained, *ties)}
        content["modules_to_save"] = sorted(saved) or None
        content["ensure_weight_tying"] = bool(ties)
        content["revision"] = on_hub[1] if on_hub else None
        if model.first_new_token is not None:
            # Users of PEFT resize the embeddings to this tokenizer.
            files = read_attachments(reader)
            write_assets(folder, {k: x for k, x in files.items() if k not in MODEL_CONFIG_FILES})
        write_synced(folder / ADAPTER_CONFIG, (json.dumps(content, indent=2) + "\n").encode())
        checksums.write(folder)
    return sum(entry.nbytes for entry in entries)


def _target_modules(layers: list[str], names: Collection[str]) -> list[str]:
    """Return the last parts of the layers' names if these match no other layer, or full names."""
    ends = {layer.rpartition(".")[2] for layer in layers}
    bases = (name.removesuffix(".weight") for name in names if not is_adapter_name(name))
    matches = {base for base in bases if base.rpartition(".")[2] in ends}
    return sorted(ends) if matches <= set(layers) else layers


def _adapter_config(model: ModelConfig, names: list[str], base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json; `base` is the name of the base model."""
    plain, adapted = build_base_model(model), adapted_layers(names)
    linear = [each for each in adapted if EXPERT_ADAPTERS not in each]
    # In a model with stacked experts, PEFT would take layers in _RENAMED for matrices of experts,
    # so they are listed in target_parameters. PEFT does not support dropout for these.
    has_stacks = bool([*named_experts(plain)])
    renamed = [each for each in linear if has_stacks and each.endswith(_RENAMED)]
    stacked = [adapted_weight(x) for x in adapted if EXPERT_ADAPTERS in x or x in renamed]
    lora, alpha = model.lora, model.lora.used_alpha
    assert lora.rank is not None
    layers = [each for each in linear if each not in renamed]
    prefixes = tuple(f"{each}." for each in renamed)
    other_names = [each for each in names if not each.startswith(prefixes)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0 if stacked else lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "target_modules": _target_modules(layers, other_names),
        "target_parameters": stacked or None,
        "bias": "none",
        "fan_in_fan_out": not transposed_layers(plain).isdisjoint(linear),
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
