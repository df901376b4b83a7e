"""Open a run on this machine: its data, its model, and its directory."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.base import weights_in_model_path
from fsdpctl.checkpoint.load import check_weights
from fsdpctl.checkpoint.pretrained import open_weights, tokenizer_beside
from fsdpctl.checkpoint.remote_run import remote_of
from fsdpctl.config.compose import Composed
from fsdpctl.config.gguf_model import notes_on_gguf
from fsdpctl.config.hub import announce_weights, local_model, part_of_run
from fsdpctl.config.keys import AUTO
from fsdpctl.config.model import OWN
from fsdpctl.config.overrides import read_run_config
from fsdpctl.config.peft import notes_on_adapters
from fsdpctl.config.schema import SIZES, C, Config, Filled, Placed
from fsdpctl.config.serialize import config_from_words, config_words
from fsdpctl.data.data_set import DataSet
from fsdpctl.engine.blocks import missing_compiler
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.files import keep_cache, read_text_file
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.io.run_files import CACHE, OVERRIDES, RUN_CONFIG, RUNS
from fsdpctl.models.decoder_check import with_decoder
from fsdpctl.models.describe import divide_module
from fsdpctl.models.registry import build_model
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.resolve.attention_kernel import check_attention, notes_on_kernel
from fsdpctl.resolve.data import (
    DATE,
    check_validation,
    checked_data,
    is_here,
    notes_on_data,
    notes_on_epochs,
    with_data,
)
from fsdpctl.resolve.launchers import Place, place_of
from fsdpctl.resolve.own import Task
from fsdpctl.resolve.place import notes_on_cluster, notes_on_cores, on_this_machine, place
from fsdpctl.resolve.rules import check_preflight, check_trained, checked
from fsdpctl.resolve.settle import RunPlan, settle
from fsdpctl.resolve.usual import OF_DATA, OF_MODEL, OF_STEP, Facts, filled, total_steps
from fsdpctl.resolve.vocabulary import notes_on_new_rows, with_vocabulary

# Settings that decide the losses; the others may change from one start of a run to the next.
_DECIDES = ("model", "data", "optimizer", "lr_scheduler", "precision")
_DECIDING_KEYS = ("train.seed", "train.seq_len", "train.global_batch_size")
# Values of `auto` that follow from the data, the length of a run or its ranks.
_OF_CONTENT = {"train.seq_len", SIZES[0]}
_FOLLOWING = {*_OF_CONTENT, "lr_scheduler.warmup_steps"}
_OF_DAY = {DATE, "precision.param_dtype"}  # and the machine


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


def open_run(
    composed: Composed, where: Place | None = None, resume: str = AUTO, *, dry: bool = False
) -> Opened:
    """Open the data and the model of a run on this machine, and name its directory.

    The ranks are `where`, or those of the launcher's variables. If dry, no weights are fetched. A
    run that its directory has begun keeps its values of `auto`, unless `--resume` is another.
    UsageError if the run is invalid; the message names the key.
    """
    composed = on_this_machine(composed)
    where = where or place_of(composed.config.launch)
    with doing("opening the model and the data"):
        return _as_begun(composed, resume, lambda each: _open(each, where, dry=dry))


def _as_begun(composed: Composed, resume: str, open_it: Callable[[Composed], Opened]) -> Opened:
    """Open a run with the values of `auto` that decide its losses as it was begun with them.

    Only an opened run has a directory. Another length or number of ranks, or another day if the
    template writes the date, would change them.
    """
    opened = open_it(composed)
    begun = _begun_in(opened.config) if resume == AUTO else None
    if begun is None:
        return opened
    kept, typed = begun
    values = {
        name: value
        for name in (_following(composed) | _OF_DAY & composed.automatic) - typed
        if None not in (value := kept.value(name), now := opened.config.value(name))
        if value != now
    }
    if not values:
        return opened
    about = values | {"train.run_dir": opened.config.train.run_dir}
    left = composed.automatic - values.keys()
    return open_it(replace(composed, config=composed.config.changed(about), automatic=left))


def _following(composed: Composed) -> set[str]:
    """Return the keys whose `auto` follows from the data, the length or the ranks of a run."""
    counts_tokens = composed.config.train.global_batch_tokens is not None
    return _FOLLOWING & composed.automatic - ({SIZES[0]} if counts_tokens else set())


def _begun_in(config: Config) -> tuple[Config, set[str]] | None:
    """Return the configuration that a run's directory or its store has, and what was typed."""
    run_dir = Path(str(config.train.run_dir))
    with suppress(UsageError):  # reported by `look`
        if (run_dir / RUN_CONFIG).is_file():
            lines = read_text_file(run_dir / OVERRIDES).splitlines()
            words = read_run_config(run_dir / RUN_CONFIG)
            return config_from_words(words), {each.partition("=")[0] for each in lines}
        remote = remote_of(config)
        if remote is not None and (stored := remote.newest()) is not None:
            return config_from_words(stored.manifest.config), set()
    return None


def _open(composed: Composed, where: Place, *, dry: bool) -> Opened:
    check_preflight(composed.config)
    config = place(composed.config, where)
    try:
        checked(config, composed.typed)  # an error does not wait for the data
    except UsageError as error:
        key = str(error).partition("=")[0]
        sets = f" (recipe {composed.recipe} sets {key})" if key in composed.from_recipe else ""
        raise UsageError(f"{error}{sets}") from None
    check_attention(config, here=True)
    config, notes = _with_compiler(config)
    notes += notes_on_cluster(composed) + notes_on_cores(config) + notes_on_kernel(config)
    config = with_vocabulary(_with_model_path(config, dry=dry))
    config, on_packing = with_decoder(config)
    notes += on_packing + notes_on_adapters(config.model.path, config.model.lora.path)
    notes += notes_on_gguf(config.model.path)
    cache = Path(config.train.run_dir or RUNS) / CACHE
    why = None if dry else keep_cache(cache)
    data = checked_data(config)
    notes += (f"cache: {why}; using {cache}",) if why and cache.exists() else ()
    config = with_data(filled(config, OF_DATA, Facts(data), composed.automatic), data)
    config = filled(config, OF_STEP, Facts(data), composed.automatic)
    module = build_model(config.model)
    check_trained(config, divide_module(module, None))
    is_there = not (dry and announce_weights(str(config.model.path)))
    if config.model.is_pretrained and is_there:
        check_weights(weights_in_model_path(config.model, module, config.train.seed), module)
    notes += notes_on_new_rows(config, module) + notes_on_data(config, data)
    return _opened(composed, config, data, module, notes)


def open_task(composed: Composed, where: Place | None, resume: str, task: Task) -> Opened:
    """Return a run of a module of a script, as `open_run`.

    UsageError if the run is invalid; the message names the key.
    """
    return _as_begun(composed, resume, lambda each: _open_task(each, where, task))


def _open_task(composed: Composed, where: Place | None, task: Task) -> Opened:
    config = place(composed.config, where)
    check_preflight(config)
    checked(config, composed.typed)
    check_validation(config, task.data)
    config, notes = _with_compiler(config)
    config = filled(config, OF_STEP, Facts(task.data), composed.automatic)
    check_trained(config, divide_module(task.module, None))
    return _opened(composed, config, task.data, task.module, notes + task.notes)


def _opened(
    composed: Composed, config: Placed, data: DataSet, module: Any, notes: tuple[str, ...]
) -> Opened:
    others = dict.fromkeys(("train.epochs", "train.tokens", "train.global_batch_tokens"))
    steps = total_steps(config, data)
    notes += () if config.model.is_own else notes_on_epochs(config, data, steps)
    config = config.changed({"train.steps": steps, **others})
    config = filled(config, OF_MODEL, Facts(data, module), composed.automatic)
    config = _with_run_dir(config, composed)
    return Opened(Filled(config), composed.automatic, composed.unset, data, module, notes)


def data_of(config: Config) -> DataSet:
    """Open the data of an estimate, with the tokenizer that a run takes."""
    return checked_data(_with_model_path(config, dry=True))


def fill_on_cluster(
    composed: Composed, data_of: Callable[[Config], DataSet] = data_of, *, every: bool = False
) -> Filled:
    """Return a configuration on its cluster, with what follows from data that is on this machine.

    It is not opened. With `every`, its strategy is not the one that is estimated.
    """
    config, automatic = place(composed.config), composed.automatic
    any_strategy = replace(config, strategy=config.strategy.under(AUTO))
    checked(any_strategy if every else config, composed.typed)
    config, _ = with_decoder(with_vocabulary(config))
    if is_gguf(Path(str(config.model.path))):
        open_weights(config.model)  # whose tensors must be those that the file describes
    data = None
    if config.model.vocab_size is None or (_OF_CONTENT & automatic and is_here(config.data)):
        try:
            data = data_of(config)
        except UsageError:
            if config.model.vocab_size is None or os.path.exists(config.model.path or os.curdir):
                raise  # else the tokenizer cannot be fetched, and the usual length is assumed
    if data is not None:
        config = filled(config, OF_DATA, Facts(data), automatic)
        config = config.changed({"model.vocab_size": with_data(config, data).model.vocab_size})
    return Filled(filled(config, OF_STEP, Facts(data), automatic))


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


def _with_run_dir(config: C, composed: Composed) -> C:
    run_dir = config.train.run_dir
    if run_dir is not None and Path(run_dir).is_symlink():  # such as runs/latest
        run_dir = os.path.relpath(os.path.realpath(run_dir))
    if run_dir is None:
        name = composed.recipe or config.model.name.removeprefix(OWN)
        # Its name does not change with its length, its data and its ranks.
        same = {each: composed.config.value(each) for each in _following(composed)}
        run_dir = str(Path(RUNS) / f"{name}-{run_identity(config.changed(same))}")
    return replace(config, train=replace(config.train, run_dir=run_dir))
