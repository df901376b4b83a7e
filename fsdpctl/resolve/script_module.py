"""A module of a script, and the settings that it has."""

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
from fsdpctl.config.model import SCRIPT_PREFIX
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

# Of decoders and their tokens, and of estimates, which trace a decoder.
_OF_DECODERS = (
    "model", "data", "cluster", "train.seq_len", "train.tokens", "train.global_batch_tokens",
    "train.context_parallel", "train.sample_tokens", "train.loss_chunk_tokens",
    "train.mlp_chunk_tokens", "train.require_fit", "engine.program",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """A module with values, its data, and in that its loss."""

    module: nn.Module
    data: DataSet

    @property
    def notes(self) -> tuple[str, ...]:
        """A line about modules in eval mode, which stay in it; () if there are none."""
        modes = [each.training for each in self.module.modules()]
        if all(modes):
            return ()
        what = f"{modes.count(False)} of its {len(modes)} modules are in eval mode and stay in it"
        return (f"module: {what}; call module.train() first to train it in training mode",)

    @property
    def name(self) -> str:
        """The class of the module, with a checksum of its parameters' names and shapes."""
        about = [
            (name, [*param.shape], dtype_name(param.dtype), param.requires_grad)
            for name, param in self.module.named_parameters()
        ]
        digest = hashlib.sha256(repr(about).encode()).hexdigest()
        return f"{type(self.module).__name__}-{digest[:6]}"


def make_task(
    module: Any, loss: Any, data: Any, val_data: Any, collate: Callable[[list[Any]], Any] | None
) -> ScriptTask:
    """Check the arguments of `fsdpctl.train`; UsageError if one is of another type, or empty."""
    check_module(module, needs_values=True)
    if not any(param.requires_grad for param in module.parameters()):
        raise UsageError("module: expected at least one trained parameter, got none")
    for name, buffer in persistent_buffers(module).items():
        if buffer.dtype not in DTYPE_NAMES:
            raise UsageError(
                f"module: buffer {name} is {buffer.dtype}, which checkpoints do not hold; register "
                "it with persistent=False"
            )
    for name, each in {"loss": loss, "collate_fn": collate or default_collate}.items():
        if not callable(each):
            raise UsageError(f"{name}: expected a function, got {type(each).__name__}")
    parts = {"data": data} if val_data is None else {"data": data, "val_data": val_data}
    for name, each in parts.items():
        if (advice := _other_than_samples(name, each)) is not None:
            raise UsageError(
                f"{name}: expected a map-style Dataset, with __getitem__ and __len__, got "
                f"{type(each).__name__}{advice}"
            )
        if not len(each):
            raise UsageError(f"{name}: expected at least one sample, got none")
    train, *val = (ScriptData(each, collate or default_collate, loss) for each in parts.values())
    held = val[0] if val else None
    return ScriptTask(module, DataSet(train, held, ByteTokenizer(), 1, type(data).__name__))


def _other_than_samples(name: str, given: Any) -> str | None:
    """Return what to pass in place of something without samples by number; None: it has them."""
    if isinstance(given, DataLoader):
        return f"; pass its dataset: {name}=loader.dataset, collate_fn=loader.collate_fn"
    if isinstance(given, Mapping):  # of splits, or columns
        keys = ", ".join(map(repr, islice(given, 3)))
        return None if 0 in given else f"; pass one of its values, or a list of samples ({keys}, …)"
    if hasattr(given, "iloc"):
        return f'; pass its rows: {name}=frame.to_dict("records")'
    if isinstance(given, str | bytes | Path):
        return "; pass the samples in this file"
    if isinstance(given, IterableDataset) or not hasattr(given, "__getitem__"):
        return f"; pass a list of its samples: {name}=list(samples)"
    return None if hasattr(given, "__len__") else "; define __len__"


def compose_task(
    task: ScriptTask, settings: Sequence[str], recipe: str | None
) -> tuple[Composed, list[str]]:
    """Return the configuration of a script's run, and what is recorded as given.

    The last value of a key counts: scripts append those of the command line to their own.
    UsageError if a setting is invalid, or only valid with a decoder; the message names it.
    """
    if isinstance(settings, Mapping):
        words = [f"{name}={value}" for name, value in islice(settings.items(), 2)]
        raise UsageError(f"settings: expected a list of KEY=VALUE, got a dict; write {words}")
    is_list = isinstance(settings, Sequence) and not isinstance(settings, str)
    if not is_list or not all(isinstance(each, str) for each in settings):
        raise UsageError(f"settings: expected a list of KEY=VALUE, got {settings!r:.60}")
    settings = list({each.partition("=")[0]: each for each in settings}.values())
    read = [] if recipe is None else read_recipe(find_recipe(recipe))
    for where, pairs in (("", parse_settings(settings)), (f"{recipe}: ", read)):
        for name, text in pairs:
            is_of_theirs = name in _OF_DECODERS or name.partition(".")[0] in _OF_DECODERS
            if is_of_theirs or (name == "engine" and text != FSDPCTL):
                why = "only valid with a decoder, not with a module of a script"
                raise UsageError(f"{where}{name}={text}: {why}")
    composed = compose_config(settings, recipe)
    for name in auto_names(composed.config):
        raise UsageError(f"{name}=auto: selected by an estimate of a decoder; set a value")
    values = {
        "model": SCRIPT_PREFIX + task.name, "model.vocab_size": 1, "data": "own",
        "train.seq_len": 1, "train.sample_tokens": 0, "train.loss_chunk_tokens": 0,
        "train.mlp_chunk_tokens": 0,
    }  # fmt: skip
    of_recipe = [] if recipe is None else [f"--recipe {recipe}"]
    config = composed.config.changed(values, Origin.DERIVED)
    return replace(composed, config=config), [*of_recipe, *settings]
