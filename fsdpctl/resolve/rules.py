"""The rules of settings that depend on one another: a row each, for every command.

Each row has its message, in which `{section.key}` is a value, and the condition of the mistake. A
setting that is still `auto` breaks no rule.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from fsdpctl.config.keys import AUTO
from fsdpctl.config.schema import DTYPES, KEYS, SECTIONS, Config, OptimizerConfig
from fsdpctl.errors import UsageError
from fsdpctl.plan.muon import CUTTING, keeps_matrices
from fsdpctl.plan.optimizers import OPTIMIZERS, OptimizerRow, get_optimizer
from fsdpctl.plan.sizes import Offload
from fsdpctl.plan.states import SPLIT
from fsdpctl.plan.strategy import (
    DDP,
    FSDPCTL,
    check_offload_params,
    check_strategy,
    get_strategy,
)
from fsdpctl.resolve.attention_kernel import check_attention
from fsdpctl.resolve.machine import (
    may_share_memory,
    resolved_strategy,
    strategy_that_runs,
    world_size,
)


class Rule(NamedTuple):
    """A mistake."""

    message: str
    is_broken: Callable[[Config], bool]


def checked(config: Config) -> Config:
    """Check the settings of a placed configuration against one another.

    Returns:
        The configuration with the sizes of its strategy, unless that is `auto`.

    Raises:
        UsageError: If some conflict; the message names the keys.
    """
    if config.strategy.name != AUTO:
        row = get_strategy(config.strategy.name)
        check_strategy(config.engine.name, row)
        if config.strategy.offload_params:
            check_offload_params(row)
        config = replace(config, strategy=resolved_strategy(config))
    for message in _broken(config):
        raise UsageError(message)
    check_attention(config)
    return config


def _broken(config: Config) -> Iterator[str]:
    """Yield the messages of the rules that a configuration breaks."""
    yield from _keys_of_others(config)
    sections = {name: getattr(config, name) for name in SECTIONS}
    about = {"FSDPCTL": FSDPCTL, "SPLIT": SPLIT, "ranks": world_size(config)}
    for rule in RULES:
        if rule.is_broken(config):
            yield rule.message.format(**sections, **about)


def _keys_of_others(config: Config) -> Iterator[str]:
    """Yield settings of an optimizer that is not used."""
    about, usual = config.optimizer, OptimizerConfig()
    names = {name for each in OPTIMIZERS.values() for name in each.keys}
    for name in sorted(names - {*get_optimizer(about.name).keys}):
        if (value := getattr(about, name)) != getattr(usual, name):
            text = KEYS[f"optimizer.{name}"].text(value)
            others = " or ".join(each.name for each in OPTIMIZERS.values() if name in each.keys)
            yield f"optimizer.{name}={text}: only valid with optimizer={others}"


def _row(config: Config) -> OptimizerRow:
    return get_optimizer(config.optimizer.name)


def _is_other_engine(config: Config) -> bool:
    return config.engine.name != FSDPCTL


def _offloads(config: Config) -> bool:
    return config.optimizer.offload != Offload.NONE


def _offloads_inputs(config: Config) -> bool:
    return config.activation_checkpointing.offload


def _shares(config: Config) -> bool:
    return config.train.context_parallel > 1


def _divides(config: Config) -> bool:
    """Return whether several ranks run a strategy that is known, not `auto`."""
    return config.strategy.name != AUTO and world_size(config) > 1


def _steps_everything(config: Config) -> bool:
    """Return whether each of several ranks steps all parameters."""
    if not _divides(config):
        return False
    given = config.strategy
    row, size = strategy_that_runs(config, get_strategy(given.name), given.dp_shard_size)
    return size == 1 or not row.shards_optimizer


def _is_uneven_on_nodes(config: Config) -> bool:
    shared, each = config.train.context_parallel, config.launch.nproc_per_node or 1
    return bool(each % shared and shared % each)


_OFFLOAD = "optimizer.offload={optimizer.offload}: "
_PARAMS = "strategy.offload_params=true: "
_INPUTS = "activation_checkpointing.offload=true: requires "
_CONTEXT = "train.context_parallel={train.context_parallel}: "
RULES = (
    Rule(
        "precision.master_dtype={SPLIT}: only valid with optimizer=adamw",
        lambda c: not _row(c).splits_masters and c.precision.master_dtype == SPLIT,
    ),
    Rule(
        _PARAMS + "conflicts with launch.share_memory=true",
        lambda c: c.strategy.offload_params and c.launch.share_memory is True,
    ),
    Rule(
        _PARAMS + "requires engine={FSDPCTL}, got engine={engine.name}",
        lambda c: c.strategy.offload_params and _is_other_engine(c),
    ),
    Rule(
        _PARAMS
        + "not supported with optimizer=muon on several ranks, which updates whole matrices",
        lambda c: c.strategy.offload_params and _row(c).steps_matrices and world_size(c) > 1,
    ),
    Rule(
        "launch.share_memory=true: requires launch.device=cpu, launch.nnodes=1 and "
        "engine={FSDPCTL}; got {launch.device}, {launch.nnodes} and {engine.name}",
        lambda c: c.launch.share_memory is True and not may_share_memory(c),
    ),
    Rule(
        "optimizer.lr=auto: not supported with optimizer={optimizer.name}; set a number",
        lambda c: not _row(c).has_usual_lr and c.optimizer.lr is None,
    ),
    Rule(
        "optimizer.state_dtype={optimizer.state_dtype}: requires engine={FSDPCTL}, got "
        "engine={engine.name}",
        lambda c: _is_other_engine(c) and c.optimizer.state_dtype is not None,
    ),
    Rule(
        "precision.master_dtype={precision.master_dtype}: requires engine={FSDPCTL}, got "
        "engine={engine.name}",
        lambda c: _is_other_engine(c) and c.precision.master_dtype not in (None, *DTYPES),
    ),
    Rule(
        "engine=ddp: reduces gradients in the dtype of the master weights; expected "
        "precision.reduce_dtype={precision.master_dtype}, got {precision.reduce_dtype}",
        lambda c: c.engine.name == DDP and c.precision.reduce_dtype != c.precision.master_dtype,
    ),
    Rule(
        _INPUTS + "activation_checkpointing=full or selective, got "
        "activation_checkpointing={activation_checkpointing.name}",
        lambda c: _offloads_inputs(c) and c.activation_checkpointing.name == "none",
    ),
    Rule(
        _INPUTS + "engine={FSDPCTL}, got engine={engine.name}",
        lambda c: _offloads_inputs(c) and _is_other_engine(c),
    ),
    Rule(
        _INPUTS + "train.compile=false with selective",
        lambda c: (
            _offloads_inputs(c)
            and c.train.compile
            and c.activation_checkpointing.name == "selective"
        ),
    ),
    Rule(
        _OFFLOAD + "requires engine={FSDPCTL}, got engine={engine.name}",
        lambda c: _offloads(c) and _is_other_engine(c),
    ),
    Rule(
        _OFFLOAD + "requires optimizer=adamw, got optimizer={optimizer.name}",
        lambda c: _offloads(c) and not _row(c).offloads,
    ),
    Rule(
        _OFFLOAD + "conflicts with optimizer.state_dtype={optimizer.state_dtype}",
        lambda c: _offloads(c) and c.optimizer.state_dtype not in (None, "float32"),
    ),
    Rule(
        _OFFLOAD + "conflicts with precision.master_dtype={precision.master_dtype}",
        lambda c: _offloads(c) and c.precision.master_dtype not in (None, "float32"),
    ),
    Rule(
        _OFFLOAD + "not supported with strategy={strategy.name} "
        "strategy.dp_shard_size={strategy.dp_shard_size} on {ranks} ranks, which would all step "
        "all parameters; expected a strategy that shards optimizer states, such as shard_grad_op",
        lambda c: _offloads(c) and c.strategy.dp_shard_size == 1 and _steps_everything(c),
    ),
    Rule(
        _OFFLOAD + "not supported with strategy={strategy.name} on {ranks} ranks, which would all "
        "step all parameters; expected a strategy that shards optimizer states, such as "
        "shard_grad_op",
        lambda c: _offloads(c) and _steps_everything(c),
    ),
    Rule(
        _CONTEXT + "requires engine={FSDPCTL}, got engine={engine.name}",
        lambda c: _shares(c) and _is_other_engine(c),
    ),
    Rule(
        _CONTEXT + "expected a divisor of the {ranks} ranks",
        lambda c: world_size(c) % c.train.context_parallel > 0,
    ),
    Rule(
        _CONTEXT + "expected a divisor or a multiple of the {launch.nproc_per_node} ranks of a "
        "node, so that ranks that share samples are near one another",
        _is_uneven_on_nodes,
    ),
    Rule(
        _CONTEXT + "expected a divisor of model.num_heads={model.num_heads}, which ranks share "
        "during attention",
        lambda c: c.model.num_heads % c.train.context_parallel > 0,
    ),
    Rule(
        "engine={engine.name}: not supported with optimizer=muon",
        lambda c: _row(c).steps_matrices and _is_other_engine(c),
    ),
    Rule(
        "engine={engine.name}: trains all parameters; model.lora and model.trainable require "
        "engine={FSDPCTL}",
        lambda c: _is_other_engine(c) and (c.model.lora.rank or c.model.trainable) is not None,
    ),
    Rule(
        "optimizer=muon: updates whole matrices, of which model.lora trains none; use "
        "optimizer=adamw",
        lambda c: _row(c).steps_matrices and c.model.lora.rank is not None,
    ),
    Rule(
        "strategy={strategy.name}: cuts matrices, which optimizer=muon updates as a whole; "
        "expected shard_optimizer or no_shard",
        lambda c: (
            _row(c).steps_matrices
            and _divides(c)
            and not keeps_matrices(get_strategy(c.strategy.name))
        ),
    ),
    Rule(
        "strategy.owner_map={strategy.owner_map}: cuts matrices, which optimizer=muon updates as "
        "a whole; expected matrices, round_robin or contiguous",
        lambda c: (
            _row(c).steps_matrices
            and _divides(c)
            and get_strategy(c.strategy.name).has_owner_map
            and c.strategy.owner_map in CUTTING
        ),
    ),
    Rule(
        "train.seq_len={train.seq_len}: above model.max_seq_len={model.max_seq_len}",
        lambda c: c.train.seq_len > c.model.max_seq_len,
    ),
)
