"""Open a run on this machine: its data, its model, and its directory."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.base import weights_in_model_path
from fsdpctl.checkpoint.load import check_weights
from fsdpctl.checkpoint.pretrained import open_weights, tokenizer_beside
from fsdpctl.config.auto import left_open
from fsdpctl.config.compose import Composed
from fsdpctl.config.gguf_model import notes_on_gguf
from fsdpctl.config.hub import announce_weights, local_model, part_of_run
from fsdpctl.config.keys import AUTO
from fsdpctl.config.model import OWN
from fsdpctl.config.peft import notes_on_adapters
from fsdpctl.config.schema import C, Config, Filled, Placed
from fsdpctl.config.serialize import config_words
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.open_data import open_data
from fsdpctl.engine.blocks import missing_compiler
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.models.decoder_check import with_decoder
from fsdpctl.models.describe import divide_module
from fsdpctl.models.registry import build_model
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.resolve.attention_kernel import check_attention, notes_on_kernel
from fsdpctl.resolve.data import (
    DATE,
    check_validation,
    checked_data,
    date_of_run,
    notes_on_data,
    on_date,
    vocabulary_of,
    with_data,
)
from fsdpctl.resolve.launchers import Place, place_of
from fsdpctl.resolve.own import Task
from fsdpctl.resolve.place import notes_on_cluster, on_this_machine, place
from fsdpctl.resolve.rules import check_preflight, check_trained, checked
from fsdpctl.resolve.settle import RunPlan, settle
from fsdpctl.resolve.usual import OF_DATA, OF_MODEL, OF_STEP, Facts, filled, total_steps
from fsdpctl.resolve.vocabulary import notes_on_new_rows, with_vocabulary

# Settings that decide the losses; the others may change from one start of a run to the next.
_DECIDES = ("model", "data", "optimizer", "lr_scheduler", "precision")
_DECIDING_KEYS = ("train.seed", "train.seq_len", "train.global_batch_size")


@dataclass(frozen=True, slots=True)
class Opened:
    """A run with its data and its model; settings that depend on its ranks are as requested."""

    config: Filled  # every setting that decides the losses is final, and so is the run directory
    automatic: frozenset[str]  # keys without a value
    unset: tuple[str, ...]  # settings that are selected if their defaults do not fit
    data: DataSet
    module: TransformersDecoder  # on the meta device
    notes: tuple[str, ...]  # settings that cannot be honored


def decides_losses(name: str) -> bool:
    """Return whether a key decides the losses of a run, up to rounding."""
    if name == "model.attention":
        return False
    return name.split(".")[0] in _DECIDES or name in _DECIDING_KEYS


def open_run(composed: Composed, where: Place | None = None, *, dry: bool = False) -> Opened:
    """Open the data and the model of a run on this machine, and name its directory.

    The ranks are `where`, or those of the launcher's variables. If dry, no weights are fetched.

    Raises:
        UsageError: If the run is invalid; the message names the key.
    """
    composed = on_this_machine(composed)
    where = where or place_of(composed.config.launch)
    with doing("opening the model and the data"):
        opened = _open(composed, where, dry=dry)
    # The template may write the date, and only an opened run has a directory with another one.
    begun = date_of_run(opened.config, opened.data)
    return opened if begun is None else _open(on_date(composed, begun), where, dry=dry)


def _open(composed: Composed, where: Place, *, dry: bool) -> Opened:
    left_open(composed.config)  # fails if a selected setting has a value too
    check_preflight(composed.config)
    config = place(composed.config, where)
    try:
        checked(config)  # an error does not wait for the data
    except UsageError as error:
        key = str(error).partition("=")[0]
        sets = f" (recipe {composed.recipe} sets {key})" if key in composed.from_recipe else ""
        raise UsageError(f"{error}{sets}") from None
    check_attention(config, here=True)
    config, notes = _with_compiler(config)
    notes += notes_on_cluster(composed) + notes_on_kernel(config)
    config = with_vocabulary(_with_model_path(config, dry=dry))
    config, on_packing = with_decoder(config)
    notes += on_packing + notes_on_adapters(config.model.path, config.model.lora.path)
    notes += notes_on_gguf(config.model.path)
    data = checked_data(config)
    config = with_data(filled(config, OF_DATA, Facts(data), composed.automatic), data)
    config = filled(config, OF_STEP, Facts(data), composed.automatic)
    module = build_model(config.model)
    check_trained(config, divide_module(module, None))
    is_there = not (dry and announce_weights(str(config.model.path)))
    if config.model.is_pretrained and is_there:
        check_weights(weights_in_model_path(config.model, module, config.train.seed), module)
    notes += notes_on_new_rows(config, module) + notes_on_data(config, data)
    return _opened(composed, config, data, module, notes)


def open_task(composed: Composed, where: Place | None, task: Task) -> Opened:
    """Return a run of a module of a script, as `open_run`.

    Raises:
        UsageError: If the run is invalid; the message names the key.
    """
    config = place(composed.config, where)
    check_preflight(config)
    checked(config)
    check_validation(config, task.data)
    config, notes = _with_compiler(config)
    config = filled(config, OF_STEP, Facts(task.data), composed.automatic)
    check_trained(config, divide_module(task.module, None))
    return _opened(composed, config, task.data, task.module, notes + task.notes)


def _opened(
    composed: Composed, config: Placed, data: DataSet, module: Any, notes: tuple[str, ...]
) -> Opened:
    others = dict.fromkeys(("train.epochs", "train.tokens", "train.global_batch_tokens"))
    config = config.changed({"train.steps": total_steps(config, data), **others})
    config = filled(config, OF_MODEL, Facts(data, module), composed.automatic)
    config = _with_run_dir(config, composed.recipe)
    return Opened(Filled(config), composed.automatic, composed.unset, data, module, notes)


def fill_on_cluster(composed: Composed, *, every: bool = False) -> Filled:
    """Return a configuration on its cluster, with the vocabulary of its data if it sets none.

    It is not opened. With `every`, its strategy is not the one that is estimated.
    """
    config = place(composed.config)
    checked(replace(config, strategy=config.strategy.under(AUTO)) if every else config)
    config, _ = with_decoder(with_vocabulary(config))
    if is_gguf(Path(str(config.model.path))):
        open_weights(config.model)  # whose tensors must be those that the file describes
    config = filled(config, OF_STEP, automatic=composed.automatic)
    if config.model.vocab_size is None:
        data = open_data(config.data, config.train.seed)
        config = config.changed({"model.vocab_size": vocabulary_of(config, data)})
    return Filled(config)


def plan_on_cluster(composed: Composed) -> RunPlan:
    return settle(fill_on_cluster(composed))


def _with_compiler(config: C) -> tuple[C, tuple[str, ...]]:
    missing = missing_compiler(str(config.launch.device)) if config.train.compile else None
    if missing is None:
        return config, ()
    note = f"train.compile=true: {missing}; blocks run uncompiled"
    return replace(config, train=replace(config.train, compile=False)), (note,)


def _with_model_path(config: C, *, dry: bool) -> C:
    """Fetch what is missing, make the path absolute, and use its tokenizer if no other is set."""
    if config.model.path is None:
        return config
    found = local_model(config.model.path, "tokenizer" if dry else part_of_run(config.model))
    lora = config.model.lora
    if lora.path is not None:
        lora = replace(lora, path=os.path.abspath(lora.path))
    model = replace(config.model, path=os.path.abspath(found), lora=lora)
    data = config.data
    if data.tokenizer is None and (data.name != "tokens" or model.is_pretrained):
        data = replace(data, tokenizer=tokenizer_beside(Path(str(model.path))))
    return replace(config, model=model, data=data)


def run_identity(config: Config) -> str:
    """Return six hexadecimal digits of the hash of the settings that decide the losses.

    Without those that have their default, so that a new key changes no name of a run.
    """
    usual = config_words(Config())
    words = {
        name: text
        for name, text in config_words(config).items()
        if decides_losses(name) and name != DATE and usual.get(name) != text
    }
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:6]


def _with_run_dir(config: C, recipe: str | None) -> C:
    run_dir = config.train.run_dir
    if run_dir is not None and Path(run_dir).is_symlink():  # such as runs/latest
        run_dir = os.path.relpath(os.path.realpath(run_dir))
    if run_dir is None:
        name = recipe or config.model.name.removeprefix(OWN)
        run_dir = str(Path("runs") / f"{name}-{run_identity(config)}")
    return replace(config, train=replace(config.train, run_dir=run_dir))
