"""A module of a script, and the settings that it has."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from fsdpctl.config.auto import left_open
from fsdpctl.config.compose import Composed, checked_settings, compose_config
from fsdpctl.config.model import OWN
from fsdpctl.config.recipe import find_recipe, read_recipe
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.own import OwnData
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.errors import UsageError
from fsdpctl.models.describe import dtype_name
from fsdpctl.plan.strategy import FSDPCTL

# Of decoders and their tokens, and of estimates, which trace a decoder.
_OF_DECODERS = (
    "model", "data", "cluster", "train.seq_len", "train.tokens", "train.global_batch_tokens",
    "train.context_parallel", "train.sample_tokens", "train.loss_chunk_tokens",
    "train.mlp_chunk_tokens", "train.require_fit", "engine.program",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """A module with values, its data, and in that its loss."""

    module: nn.Module
    data: DataSet

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
) -> Task:
    """Check the arguments of `fsdpctl.train`; UsageError if one is of another type, or empty."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if not any(param.requires_grad for param in module.parameters()):
        raise UsageError("module: expected at least one trained parameter, got none")
    for name, each in {"loss": loss, "collate_fn": collate or default_collate}.items():
        if not callable(each):
            raise UsageError(f"{name}: expected a function, got {type(each).__name__}")
    parts = {"data": data} if val_data is None else {"data": data, "val_data": val_data}
    for name, each in parts.items():
        if not (hasattr(each, "__getitem__") and hasattr(each, "__len__")):
            raise UsageError(
                f"{name}: expected a map-style Dataset, with __getitem__ and __len__, got "
                f"{type(each).__name__}"
            )
        if not len(each):
            raise UsageError(f"{name}: expected at least one sample, got none")
    train, *val = (OwnData(each, collate or default_collate, loss) for each in parts.values())
    held = val[0] if val else None
    return Task(module, DataSet(train, held, ByteTokenizer(), 1, type(data).__name__))


def compose_task(
    task: Task, settings: Sequence[str], recipe: str | None
) -> tuple[Composed, list[str]]:
    """Return the configuration of a script's run, and what is recorded as given.

    The last value of a key counts: scripts append those of the command line to their own.

    Raises:
        UsageError: If a setting is invalid, or only valid with a decoder; the message names it.
    """
    if isinstance(settings, str) or not all(isinstance(each, str) for each in settings):
        raise UsageError(f"settings: expected a list of KEY=VALUE, got {settings!r:.60}")
    settings = list({each.partition("=")[0]: each for each in settings}.values())
    read = [] if recipe is None else read_recipe(find_recipe(recipe))
    for where, pairs in (("", checked_settings(settings)), (f"{recipe}: ", read)):
        for name, text in pairs:
            is_of_theirs = name in _OF_DECODERS or name.partition(".")[0] in _OF_DECODERS
            if is_of_theirs or (name == "engine" and text != FSDPCTL):
                why = "only valid with a decoder, not with a module of a script"
                raise UsageError(f"{where}{name}={text}: {why}")
    composed = compose_config(settings, recipe)
    for name in left_open(composed.config):
        raise UsageError(f"{name}=auto: selected by an estimate of a decoder; set a value")
    values = {
        "model": OWN + task.name, "data": "own", "train.seq_len": 1, "model.vocab_size": 1,
        "train.sample_tokens": 0, "train.loss_chunk_tokens": 0, "train.mlp_chunk_tokens": 0,
    }  # fmt: skip
    of_recipe = [] if recipe is None else [f"--recipe {recipe}"]
    config, automatic = composed.config.changed(values), composed.automatic - values.keys()
    return replace(composed, config=config, automatic=automatic), [*of_recipe, *settings]
