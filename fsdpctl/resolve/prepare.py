"""Preparation of a configuration, its data and its module, for runs and for estimates."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fsdpctl.checkpoint.initial_weights import initial_weights
from fsdpctl.checkpoint.load import check_weights
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.remote_checkpoints import remote_checkpoints_of
from fsdpctl.config.compose import Composed
from fsdpctl.config.data import CHAT
from fsdpctl.config.gguf_model import notes_on_gguf
from fsdpctl.config.hub import Part, local_model, part_for_training, print_missing_weights
from fsdpctl.config.keys import AUTO
from fsdpctl.config.overrides import read_run_config
from fsdpctl.config.peft import notes_on_adapters
from fsdpctl.config.schema import BATCH_SIZE, Config, ConfigT, Filled, Origin, WithRanks
from fsdpctl.config.serialize import config_from_settings
from fsdpctl.data.data_set import DataSet
from fsdpctl.engine.blocks import missing_compiler
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.files import ensure_cache, read_text_file
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.io.run_files import CACHE, OVERRIDES_FILE, RUN_CONFIG, RUNS
from fsdpctl.models.build_model import build_model
from fsdpctl.models.decoder_check import adapt_to_decoder
from fsdpctl.models.module_spec import module_units
from fsdpctl.resolve.attention_kernel import can_run, check_attention, notes_on_kernel
from fsdpctl.resolve.auto_values import AUTO_VALUES, AutoInputs, Stage, fill_auto, steps_of_epochs
from fsdpctl.resolve.launchers import ESTIMATE_ROLE, LaunchRole, role_of
from fsdpctl.resolve.machine import (
    assign_ranks,
    note_on_checked_cluster,
    notes_on_cluster,
    notes_on_cores,
    without_other_cluster,
)
from fsdpctl.resolve.rules import check_preflight, check_trained_params, validate
from fsdpctl.resolve.run_data import (
    check_validation,
    is_data_here,
    notes_on_data,
    notes_on_epochs,
    open_checked_data,
    open_estimated_data,
    with_data,
)
from fsdpctl.resolve.script_module import ScriptTask
from fsdpctl.resolve.vocabulary import notes_on_new_rows, with_vocabulary

_DATA_KEYS = ("train.seq_len", BATCH_SIZE)  # `auto` of these keys depends on the data
# Keys that are replaced by steps and samples once the data is known.
_REPLACED_KEYS = ("train.epochs", "train.tokens", "train.global_batch_tokens")

Notes = tuple[str, ...]  # printed before a run starts


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration, its data and its module. Values that depend on the ranks are still open."""

    config: Filled  # for a run, settings that decide the losses and the directory are final
    notes: Notes  # settings that are not applied, and facts about the data
    data_or_error: DataSet | UsageError | None  # the error if an estimate could not open the data
    module_or_none: nn.Module | None  # on the meta device, unless a script passed it

    @property
    def data(self) -> DataSet:
        assert isinstance(self.data_or_error, DataSet)
        return self.data_or_error

    @property
    def module(self) -> Any:
        return self.module_or_none


OpenData = Callable[[Config], DataSet]


def prepare(
    composed: Composed,
    role: LaunchRole | None = None,
    *,
    task: ScriptTask | None = None,
    resume: str = AUTO,
    open_data: OpenData = open_estimated_data,
    all_strategies: bool = False,
) -> Prepared:
    """Prepare a configuration for a role; by default, that of this process.

    For an estimate, `open_data` opens the data, if a value of `auto` depends on the data. If the
    directory of the run has a configuration and `resume` is `auto`, the run keeps the values of
    `auto` that its first start had. A `task` replaces the module and the data of the settings. With
    `all_strategies`, rules of the selected strategy are not checked. UsageError if the
    configuration is invalid; the message names the key.
    """
    if role is None or role.is_here:
        composed = without_other_cluster(composed)
    role = role or role_of(composed.config.launch)
    preparation = _Preparation(composed, role, task, open_data, all_strategies)
    if role is ESTIMATE_ROLE:
        return preparation.run()
    with doing("opening the model and the data"):
        prepared = preparation.run()
        if not (stored := _stored_values(prepared.config) if resume == AUTO else {}):
            return prepared
        # Prepare again: the date of the first start may be part of the tokens of the data.
        composed = replace(composed, config=composed.config.changed(stored, Origin.DERIVED))
        return replace(preparation, composed=composed).run()


@dataclass(frozen=True, slots=True)
class _Preparation:
    """The steps of `prepare`, in their order."""

    composed: Composed
    role: LaunchRole
    task: ScriptTask | None
    open_data: OpenData
    all_strategies: bool

    @property
    def is_run(self) -> bool:
        """Whether this is a run, or a dry one, rather than an estimate."""
        return self.role is not ESTIMATE_ROLE

    def run(self) -> Prepared:
        inputs = AutoInputs(self.role.is_here, recipe=self.composed.recipe)
        config, notes = self._placed(inputs)
        if self.task is None:
            config, model_notes = self._with_model(config, inputs)
            notes += model_notes
        data, cache_notes = self._data(config)
        inputs = inputs._replace(data=data if isinstance(data, DataSet) else None)
        config = fill_auto(config, Stage.DATA, inputs)
        if inputs.data is not None and self.task is None:
            config = with_data(config, inputs.data)
        module, module_notes = self._module(config, inputs)
        config = fill_auto(config, Stage.MODULE, inputs._replace(module=module))
        notes += cache_notes + module_notes
        if inputs.data is not None and self.is_run:
            steps_of_epochs(config, inputs.data)  # raises UsageError if there is no sample
            steps = config.train.steps or 0
            notes += () if self.task else notes_on_epochs(config, inputs.data, steps)
            config = config.changed(dict.fromkeys(_REPLACED_KEYS))
        run_dir = config.train.run_dir
        if run_dir is not None and Path(run_dir).is_symlink():  # the link may change: runs/latest
            config = config.changed({"train.run_dir": os.path.relpath(os.path.realpath(run_dir))})
        return Prepared(Filled(config), notes, data, module)

    def _placed(self, inputs: AutoInputs) -> tuple[WithRanks, Notes]:
        if self.is_run:
            check_preflight(self.composed.config)
        config = assign_ranks(self.composed.config, self.role, inputs)
        try:  # report errors before reading data
            validate(config.with_strategy(AUTO) if self.all_strategies else config)
        except UsageError as error:
            key = str(error).partition("=")[0]  # messages of rules begin with KEY=VALUE
            is_of_recipe = config.origins.get(key) is Origin.RECIPE
            cause = f" (recipe {self.composed.recipe} sets {key})" if is_of_recipe else ""
            raise UsageError(f"{error}{cause}") from None
        if not self.role.is_here:
            return config, (note_on_checked_cluster(config),) if self.is_run else ()
        check_attention(config, is_here=True)
        notes = notes_on_cluster(self.composed)
        missing = missing_compiler(str(config.launch.device)) if config.train.compile else None
        if missing is None:
            return config, notes
        note = f"train.compile=true: {missing}; blocks run uncompiled"
        return config.changed({"train.compile": False}), (note, *notes)

    def _with_model(self, config: WithRanks, inputs: AutoInputs) -> tuple[WithRanks, Notes]:
        notes = notes_on_cores(config) + notes_on_kernel(config) if self.role.is_here else ()
        if self.is_run:
            config = _fetch_model(config, "tokenizer" if self.role.is_dry else None)
        elif is_gguf(Path(str(config.model.path))):
            open_weights(config.model)  # raises an error if tensors contradict the metadata
        config = with_vocabulary(fill_auto(config, Stage.MODEL, inputs))
        config, packing_notes = adapt_to_decoder(config)
        model = config.model
        if self.is_run:
            notes += packing_notes + notes_on_adapters(model.path, model.lora.path)
            notes += notes_on_gguf(model.path)
        return fill_auto(config, Stage.DECODER, inputs), notes

    def _data(self, config: WithRanks) -> tuple[DataSet | UsageError | None, Notes]:
        """Open the data. An estimate that can do without it may return None or the error."""
        if self.task is not None:
            check_validation(config, self.task.data)
            return self.task.data, ()
        if self.is_run:
            cache = Path(config.train.run_dir or RUNS) / CACHE
            why = None if self.role.is_dry else ensure_cache(cache)
            data = open_checked_data(config)
            return data, (f"cache: {why}; using {cache}",) if why and cache.exists() else ()
        needs_vocab = config.model.vocab_size is None
        needs_counts = any(map(config.is_auto, _DATA_KEYS)) and is_data_here(config.data)
        train, is_chat = config.train, config.data.name == CHAT and is_data_here(config.data)
        needs_length = is_chat and train.tokens is None and train.steps is None
        if not (needs_vocab or needs_counts or needs_length or train.epochs is not None):
            return None, ()
        try:
            return self.open_data(fill_auto(_fetch_model(config, "tokenizer"), Stage.MODEL)), ()
        except UsageError as error:
            if needs_vocab or (needs_counts and os.path.exists(config.model.path or os.curdir)):
                raise
            return error, ()  # without a tokenizer, the estimate assumes the default length

    def _module(self, config: WithRanks, inputs: AutoInputs) -> tuple[nn.Module | None, Notes]:
        if not self.is_run:
            return None, ()
        module = self.task.module if self.task else build_model(config.model)
        check_trained_params(config, module_units(module, None))
        if self.task is not None:
            return module, self.task.notes
        # A dry run prints what a run would fetch.
        has_weights = not (self.role.is_dry and print_missing_weights(str(config.model.path)))
        if config.model.is_pretrained and has_weights:
            check_weights(initial_weights(config.model, module, config.train.seed), module)
        assert inputs.data is not None
        return module, notes_on_new_rows(config, module) + notes_on_data(config, inputs.data)


def _fetch_model(config: ConfigT, part: Part | None) -> ConfigT:
    """Fetch a part of the model, by default what a run reads; make its paths absolute."""
    if config.model.path is None:
        return config
    path = local_model(config.model.path, part or part_for_training(config.model))
    paths = {"model.path": os.path.abspath(path)}
    if config.model.lora.path is not None:
        paths["model.lora.path"] = os.path.abspath(config.model.lora.path)
    return config.changed(paths)


def _stored_values(config: Config) -> dict[str, Any]:
    """Return the values of `auto` that the first start of a run had, if they would change now.

    They may depend on the length of the run, on the ranks, or on the date of a chat template.
    """
    if (stored := _stored_config(config)) is None:
        return {}
    first, typed_keys = stored
    keys = {x.key for x in AUTO_VALUES if x.kept_on_resume and config.is_auto(x.key)} - typed_keys
    if config.is_set("train.global_batch_tokens"):
        keys.discard(BATCH_SIZE)
    if not can_run(config, first.model.attention):
        keys.discard("model.attention")
    values = {key: (first.value(key), config.value(key)) for key in keys}
    changed = {x: old for x, (old, new) in values.items() if None not in (old, new) and old != new}
    # Values that are no longer `auto` would change the hash in the name of the directory.
    return {**changed, "train.run_dir": config.train.run_dir} if changed else {}


def _stored_config(config: Config) -> tuple[Config, set[str]] | None:
    """Return the stored configuration of a run, and the names of its settings on the command line.

    It is read from the run directory, else from the object store; None if neither has it.
    """
    run_dir = Path(str(config.train.run_dir))
    with suppress(UsageError):  # `inspect_run_dir` reports errors
        if (run_dir / RUN_CONFIG).is_file():
            lines = read_text_file(run_dir / OVERRIDES_FILE).splitlines()
            settings = read_run_config(run_dir / RUN_CONFIG)
            return config_from_settings(settings), {each.partition("=")[0] for each in lines}
        remote = remote_checkpoints_of(config)
        if remote is not None and (stored := remote.newest()) is not None:
            return config_from_settings(stored.manifest.config), set()
    return None
