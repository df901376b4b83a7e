"""Open a run on this machine: its data, its model, and its directory."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from fsdpctl.checkpoint.base import weights_in_model_path
from fsdpctl.checkpoint.load import check_weights
from fsdpctl.checkpoint.pretrained import tokenizer_beside
from fsdpctl.config.auto import left_open
from fsdpctl.config.compose import Composed
from fsdpctl.config.hub_cache import local_model
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import notes_on_adapters
from fsdpctl.config.schema import Config, OptimizerConfig
from fsdpctl.config.serialize import config_words
from fsdpctl.data.data_set import DataSet
from fsdpctl.io.activity import doing
from fsdpctl.models.describe import divide_module
from fsdpctl.models.quantized import count_weights
from fsdpctl.models.registry import build_model
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.resolve.amounts import total_steps, with_length, with_size, with_warmup
from fsdpctl.resolve.attention_kernel import check_attention, notes_on_kernel
from fsdpctl.resolve.blocks import missing_compiler
from fsdpctl.resolve.data import DATE, checked_data, date_of_run, notes_on_data, on_date, with_data
from fsdpctl.resolve.decoder_check import with_decoder
from fsdpctl.resolve.launchers import Place, place_of
from fsdpctl.resolve.machine import (
    notes_on_cluster,
    placed_here,
    with_architecture,
    with_batch_size,
)
from fsdpctl.resolve.preflight import check_preflight, check_trained
from fsdpctl.resolve.rules import checked
from fsdpctl.resolve.settle import settle

# Settings that decide the losses; the others may change from one start of a run to the next.
_DECIDES = ("model", "data", "optimizer", "lr_scheduler", "precision")
_DECIDING_KEYS = ("train.seed", "train.seq_len", "train.global_batch_size")


@dataclass(frozen=True, slots=True)
class Opened:
    """A run with its data and its model; settings that depend on its ranks are as requested."""

    config: Config  # every setting that decides the losses is final, and so is the run directory
    automatic: frozenset[str]  # keys that were `auto`
    data: DataSet
    module: TransformersDecoder  # on the meta device
    total_steps: int
    notes: tuple[str, ...]  # settings that cannot be honored


def decides_losses(name: str) -> bool:
    """Return whether a key decides the losses of a run, up to rounding."""
    if name == "model.attention":
        return False
    return name.split(".")[0] in _DECIDES or name in _DECIDING_KEYS


def open_run(composed: Composed, where: Place | None = None) -> Opened:
    """Open the data and the model of a run on this machine, and name its directory.

    The ranks are `where`, or those of the launcher's variables.

    Raises:
        UsageError: If the run is invalid; the message names the key.
    """
    where = where or place_of(composed.config.launch)
    with doing("opening the model and the data"):
        opened = _open(composed, where)
    # The template may write the date, and only an opened run has a directory with another one.
    begun = date_of_run(opened.config, opened.data)
    return opened if begun is None else _open(on_date(composed, begun), where)


def _open(composed: Composed, where: Place) -> Opened:
    left = left_open(composed.config)
    check_preflight(composed.config)
    config = placed_here(composed.config, where)
    checked(config)  # an error does not wait for the data
    check_attention(with_architecture(config), here=True)
    config, notes = _with_compiler(config)
    notes += notes_on_cluster(config) + notes_on_kernel(config)
    config = _with_alpha(_with_model_path(config))
    config, on_packing = with_decoder(config)
    notes += on_packing + notes_on_adapters(config.model.path, config.model.lora.path)
    data = checked_data(config)
    config = with_batch_size(with_data(with_length(config, data, composed.automatic), data))
    config = with_size(config, data, composed.automatic)
    if not left:
        settle(config)
    module = build_model(config.model)
    check_trained(config, divide_module(module, None))
    if config.model.is_pretrained:
        check_weights(weights_in_model_path(config.model, module, config.train.seed), module)
    config = replace(config, optimizer=_with_lr(config.optimizer, config.model, module))
    steps = total_steps(config, data)
    config = replace(config, train=replace(config.train, steps=steps, epochs=None, tokens=None))
    config = with_warmup(config, composed.automatic)
    config = _with_run_dir(config, composed.recipe)
    notes += notes_on_data(config, data)
    return Opened(config, composed.automatic, data, module, steps, notes)


def _with_compiler(config: Config) -> tuple[Config, tuple[str, ...]]:
    missing = missing_compiler(str(config.launch.device)) if config.train.compile else None
    if missing is None:
        return config, ()
    note = f"train.compile=true: {missing}; blocks run uncompiled"
    return replace(config, train=replace(config.train, compile=False)), (note,)


def _with_model_path(config: Config) -> Config:
    """Make the path absolute, and use its tokenizer if no other is set."""
    if config.model.path is None:
        return config
    local_model(config.model.path)  # raises if only the configuration is known
    lora = config.model.lora
    if lora.path is not None:
        lora = replace(lora, path=os.path.abspath(lora.path))
    model = replace(config.model, path=os.path.abspath(config.model.path), lora=lora)
    data = config.data
    if data.tokenizer is None and (data.name != "tokens" or model.is_pretrained):
        data = replace(data, tokenizer=tokenizer_beside(Path(str(model.path))))
    return replace(config, model=model, data=data)


def _with_alpha(config: Config) -> Config:
    lora = config.model.lora
    if lora.rank is None or lora.alpha is not None:
        return config
    lora = replace(lora, alpha=2.0 * lora.rank)
    return replace(config, model=replace(config.model, lora=lora))


def _with_lr(optimizer: OptimizerConfig, model: ModelConfig, module: nn.Module) -> OptimizerConfig:
    """Set the peak learning rate for the model's size.

    The rule matches the values published for Llama 3: 3e-4 at 8 B and 1.5e-4 at 70 B parameters.
    Pretrained weights are usually trained with a tenth of it, and LoRA adapters with the full rate.
    """
    if optimizer.lr is not None:
        return optimizer
    millions = sum(count_weights(module).values()) / 1e6
    tunes_all_weights = model.is_pretrained and model.lora.rank is None
    lr = (3e-4 if tunes_all_weights else 3e-3) / max(1.0, millions) ** 0.25
    return replace(optimizer, lr=float(f"{lr:.2g}"))


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


def _with_run_dir(config: Config, recipe: str | None) -> Config:
    run_dir = config.train.run_dir
    if run_dir is not None and Path(run_dir).is_symlink():  # such as runs/latest
        run_dir = os.path.relpath(os.path.realpath(run_dir))
    if run_dir is None:
        name = recipe or config.model.name
        run_dir = str(Path("runs") / f"{name}-{run_identity(config)}")
    return replace(config, train=replace(config.train, run_dir=run_dir))
