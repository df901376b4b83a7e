"""The module, the data and the settings that a script passes to `fsdpctl.train`."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fsdpctl.checkpoint.staging import DTYPE_NAMES
from fsdpctl.comm.flat_shard import persistent_buffers
from fsdpctl.config.compose import Composed, compose_config, parse_settings
from fsdpctl.config.model import SCRIPT_DATA, SCRIPT_PREFIX
from fsdpctl.config.recipe import find_recipe, read_recipe
from fsdpctl.config.schema import Origin
from fsdpctl.config.selection import auto_names
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.script_data import ScriptData
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.engine.shard_model import check_module
from fsdpctl.errors import UsageError
from fsdpctl.models.module_spec import dtype_name
from fsdpctl.plan.strategy import FSDPCTL

# Sections and keys of decoders, of tokens, or of estimates, which trace a decoder.
_DECODER_KEYS = (
    "model", "data", "cluster", "train.seq_len", "train.tokens", "train.global_batch_tokens",
    "train.context_parallel", "train.sample_tokens", "train.loss_chunk_tokens",
    "train.mlp_chunk_tokens", "train.require_fit", "engine.program",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """A module that is not on the meta device, and its data with the loss function."""

    module: nn.Module
    data: DataSet

    @property
    def notes(self) -> tuple[str, ...]:
        """A line about modules in eval mode, which stay in this mode; () if there are none."""
        modes = [each.training for each in self.module.modules()]
        if all(modes):
            return ()
        problem = f"{modes.count(False)} of its {len(modes)} modules are and stay in eval mode"
        return (f"module: {problem}; call module.train() first to train in training mode",)

    @property
    def name(self) -> str:
        """The class of the module, with a checksum of its parameters' names and shapes."""
        params = [
            (name, [*param.shape], dtype_name(param.dtype), param.requires_grad)
            for name, param in self.module.named_parameters()
        ]
        digest = hashlib.sha256(repr(params).encode()).hexdigest()
        return f"{type(self.module).__name__}-{digest[:6]}"


def make_task(
    module: Any, loss: Any, data: Any, val_data: Any, collate: Callable[[list[Any]], Any] | None
) -> ScriptTask:
    """Check the arguments of `fsdpctl.train`; UsageError if one has a wrong type, or is empty."""
    check_module(module, needs_values=True)
    if not any(param.requires_grad for param in module.parameters()):
        raise UsageError("module: expected at least one trained parameter, got none")
    for name, buffer in persistent_buffers(module).items():
        if buffer.dtype not in DTYPE_NAMES:
            problem = f"buffer {name} is {buffer.dtype}, which checkpoints do not hold"
            raise UsageError(f"module: {problem}; register it with persistent=False")
    for name, each in {"loss": loss, "collate_fn": collate or default_collate}.items():
        if not callable(each):
            raise UsageError(f"{name}: expected a function, got {type(each).__name__}")
    parts = {"data": data} if val_data is None else {"data": data, "val_data": val_data}
    for name, each in parts.items():
        if (advice := _data_advice(name, each)) is not None:
            expected = "expected a map-style Dataset, with __getitem__ and __len__"
            raise UsageError(f"{name}: {expected}, got {type(each).__name__}{advice}")
        if not len(each):
            raise UsageError(f"{name}: expected at least one sample, got none")
    train, *val = (ScriptData(each, collate or default_collate, loss) for each in parts.values())
    val_set, description = val[0] if val else None, type(data).__name__
    # A module of a script has no vocabulary: the tokenizer and its size are placeholders.
    return ScriptTask(module, DataSet(train, val_set, ByteTokenizer(), 1, description))


def _data_advice(name: str, data: Any) -> str | None:
    """Return advice for data that isn't a map-style data set; None if it is one."""
    if isinstance(data, DataLoader):
        return f"; pass its dataset: {name}=loader.dataset, collate_fn=loader.collate_fn"
    if isinstance(data, Mapping):  # maps splits, columns or indexes
        keys = ", ".join(map(repr, islice(data, 3)))
        return None if 0 in data else f"; pass one of its values, or a list of samples ({keys}, …)"
    if hasattr(data, "iloc"):
        return f'; pass its rows: {name}=frame.to_dict("records")'
    if isinstance(data, str | bytes | Path):
        return "; pass the samples in this file"
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return f"; pass a list of its samples: {name}=list(samples)"
    return None if hasattr(data, "__len__") else "; define __len__"


def compose_task(
    task: ScriptTask, settings: Sequence[str], recipe: str | None
) -> tuple[Composed, list[str]]:
    """Return the configuration of a script's run, and the settings to record with the run.

    The last value of a key counts, since scripts append settings of their command line to others.
    UsageError if a setting is invalid, or only valid with a decoder; the message names the setting.
    """
    if isinstance(settings, Mapping):
        texts = [f"{name}={value}" for name, value in islice(settings.items(), 2)]
        raise UsageError(f"settings: expected a list of KEY=VALUE, got a dict; write {texts}")
    is_list = isinstance(settings, Sequence) and not isinstance(settings, str)
    if not is_list or not all(isinstance(each, str) for each in settings):
        raise UsageError(f"settings: expected a list of KEY=VALUE, got {settings!r:.60}")
    settings = list({each.partition("=")[0]: each for each in settings}.values())
    read = [] if recipe is None else read_recipe(find_recipe(recipe))
    for location, pairs in (("", parse_settings(settings)), (f"{recipe}: ", read)):
        for name, text in pairs:
            is_decoder_key = name in _DECODER_KEYS or name.partition(".")[0] in _DECODER_KEYS
            if is_decoder_key or (name == "engine" and text != FSDPCTL):
                why = "only valid with a decoder, not with a module of a script"
                raise UsageError(f"{location}{name}={text}: {why}")
    composed = compose_config(settings, recipe)
    if names := auto_names(composed.config):
        raise UsageError(f"{names[0]}=auto: selected by an estimate of a decoder; set a value")
    values = {
        "model": SCRIPT_PREFIX + task.name, "model.vocab_size": 1, "data": SCRIPT_DATA,
        "train.seq_len": 1, "train.sample_tokens": 0, "train.loss_chunk_tokens": 0,
        "train.mlp_chunk_tokens": 0,
    }  # fmt: skip
    recipe_option = [] if recipe is None else [f"--recipe {recipe}"]
    config = composed.config.changed(values, Origin.DERIVED)
    return replace(composed, config=config), [*recipe_option, *settings]
