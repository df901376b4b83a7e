"""Checks before a run: engine, optimizer, packages, and the command after a save."""

import shlex
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

from fsdpctl.config.keys import AUTO
from fsdpctl.config.schema import DTYPES, KEYS, Config, OptimizerConfig
from fsdpctl.errors import UsageError
from fsdpctl.plan.muon import MUON, is_muons
from fsdpctl.plan.optimizers import OPTIMIZERS, get_optimizer
from fsdpctl.plan.sizes import Offload
from fsdpctl.plan.states import SPLIT
from fsdpctl.plan.strategy import DDP, FSDPCTL, check_strategy, effective_strategy, get_strategy
from fsdpctl.plan.units import UnitSpec
from fsdpctl.resolve.attention import check_attention
from fsdpctl.resolve.machine import (
    check_context,
    check_length,
    resolved_strategy,
    with_architecture,
    world_size,
)

_EXTRAS = ("tensorboard", "wandb")  # keys of `log`, packages, and extras of fsdpctl


def check_preflight(config: Config) -> None:
    """Check that the packages for logging are installed, and that `after_save` is a command.

    Raises:
        UsageError: If a package or the command is missing.
    """
    for name in _EXTRAS:
        if getattr(config.log, name) and not _is_installed(name):
            raise UsageError(f"log.{name}=true: {name} is not installed; pip install {name}")
    if config.checkpoint.after_save is not None:
        command_words(config.checkpoint.after_save)


def check_optimizer(config: Config) -> None:
    """Check that no setting is of an optimizer that is not used.

    Raises:
        UsageError: If one is, if no optimizer has the name, or if the learning rate has no default
            and is not set.
    """
    about, usual = config.optimizer, OptimizerConfig()
    row = get_optimizer(about.name)
    for name in sorted({name for each in OPTIMIZERS.values() for name in each.keys} - {*row.keys}):
        if (value := getattr(about, name)) != getattr(usual, name):
            text = KEYS[f"optimizer.{name}"].text(value)
            others = " or ".join(each.name for each in OPTIMIZERS.values() if name in each.keys)
            raise UsageError(f"optimizer.{name}={text}: only valid with optimizer={others}")
    if not row.splits_masters and config.precision.master_dtype == SPLIT:
        raise UsageError(f"precision.master_dtype={SPLIT}: only valid with optimizer=adamw")
    if not row.has_usual_lr and about.lr is None:
        raise UsageError(
            f"optimizer.lr=auto: not supported with optimizer={row.name}; set a number"
        )


def _is_installed(package: str) -> bool:
    """Return whether a package has source: wandb leaves directories of its name behind."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def command_words(command: str) -> list[str]:
    """Split `checkpoint.after_save` as a shell does, without expansions.

    Raises:
        UsageError: If a quotation does not end, or the program is not found.
    """
    where = f"checkpoint.after_save={command}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).lower()}") from None
    if not words:
        raise UsageError(f"{where}: expected a command")
    if shutil.which(words[0]) is None:
        raise UsageError(f"{where}: program {words[0]} not found")
    return words


# ---- what training and estimates check ---------------------------------------------------


def check_placed(config: Config, *, here: bool = False) -> None:
    """Check the settings of a placed configuration against one another, without its model.

    Training, estimates and comparisons call it. `here`: the ranks run on this machine.

    Raises:
        UsageError: If some conflict; the message names the keys.
    """
    check_optimizer(config)
    check_engine(config)
    check_offload(config)
    check_context(config)
    check_attention(with_architecture(config) if here else config, here=here)
    if config.strategy.name != AUTO:
        resolved_strategy(config, config.strategy)
    check_length(config)


def check_engine(config: Config) -> None:
    """Check that the engine supports a placed configuration, whose strategy may be `auto`.

    Raises:
        UsageError: If it does not; the message names the keys.
    """
    name, precision = config.engine.name, config.precision
    if name != FSDPCTL:
        for key, value, known in (
            ("optimizer.state_dtype", config.optimizer.state_dtype, (None,)),
            ("precision.master_dtype", precision.master_dtype, (None, *DTYPES)),
        ):
            if value not in known:
                raise UsageError(f"{key}={value}: requires engine={FSDPCTL}, got engine={name}")
    if config.strategy.name != AUTO:
        check_strategy(name, get_strategy(config.strategy.name))
    if name == DDP and precision.reduce_dtype != precision.master_dtype:
        raise UsageError(
            f"engine=ddp: reduces gradients in the dtype of the master weights; expected "
            f"precision.reduce_dtype={precision.master_dtype}, got {precision.reduce_dtype}"
        )


def check_activation_offload(config: Config) -> None:
    """Check that inputs of blocks can be in host memory, if they are to.

    Raises:
        UsageError: If they cannot.
    """
    mode, engine = config.activation_checkpointing.name, config.engine.name
    needs = f"activation_checkpointing=full or selective, got activation_checkpointing={mode}"
    for is_met, what in (
        (mode != "none", needs),
        (engine == FSDPCTL, f"engine={FSDPCTL}, got engine={engine}"),
        (mode != "selective" or not config.train.compile, "train.compile=false with selective"),
    ):
        if config.activation_checkpointing.offload and not is_met:
            raise UsageError(f"activation_checkpointing.offload=true: requires {what}")


def check_offload(config: Config) -> None:
    """Check that nothing conflicts with states or inputs of blocks in host memory.

    Raises:
        UsageError: If something does, in a placed configuration.
    """
    check_activation_offload(config)
    about = config.optimizer
    if about.offload == Offload.NONE:
        return
    where = f"optimizer.offload={about.offload}"
    if config.engine.name != FSDPCTL:
        raise UsageError(f"{where}: requires engine={FSDPCTL}, got engine={config.engine.name}")
    if not get_optimizer(about.name).offloads:
        raise UsageError(f"{where}: requires optimizer=adamw, got optimizer={about.name}")
    if about.state_dtype not in (None, "float32"):
        raise UsageError(f"{where}: conflicts with optimizer.state_dtype={about.state_dtype}")
    if config.precision.master_dtype not in (None, "float32"):
        dtype = config.precision.master_dtype
        raise UsageError(f"{where}: conflicts with precision.master_dtype={dtype}")
    ranks, given = world_size(config), config.strategy
    if given.name == AUTO or ranks == 1:
        return
    given = resolved_strategy(config, given)
    row, _ = effective_strategy(get_strategy(given.name), given.dp_shard_size or ranks, ranks)
    if not row.shards_optimizer:
        size = "" if row.name == given.name else f" strategy.dp_shard_size={given.dp_shard_size}"
        raise UsageError(
            f"{where}: not supported with strategy={given.name}{size} on {ranks} ranks, which "
            "would all step all parameters; expected a strategy that shards optimizer states, such "
            "as shard_grad_op"
        )


def notes_on_engine(config: Config, automatic: frozenset[str]) -> tuple[str, ...]:
    """Return the settings that the engine of a placed configuration ignores, a line each.

    Keys in `automatic` are not set.
    """
    name, precision = config.engine.name, config.precision
    wire, reduce = precision.wire_dtype, precision.reduce_dtype
    if name == FSDPCTL or wire in (None, reduce) or "precision.wire_dtype" in automatic:
        return ()
    return (f"engine={name}: sends gradients in precision.reduce_dtype={reduce}, not in {wire}",)


def check_trained(config: Config, units: Sequence[UnitSpec]) -> None:
    """Check that the optimizer and the engine support the parameters of a model.

    Raises:
        UsageError: If optimizer=muon has no matrix, or the engine does not support frozen ones.
    """
    params = [param for unit in units for param in unit.params]
    if config.optimizer.name == MUON and not any(map(is_muons, params)):
        raise UsageError(
            "optimizer=muon: the model has no trained matrix in a block; use optimizer=adamw"
        )
    if config.engine.name != FSDPCTL and not all(param.trainable for param in params):
        raise UsageError(
            f"engine={config.engine.name}: trains all parameters; model.lora and model.trainable "
            f"require engine={FSDPCTL}"
        )
