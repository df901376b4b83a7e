"""Settings with which a run needs less memory, and what they cost."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fsdpctl.config.keys import NONE
from fsdpctl.config.schema import GROUPS, KEYS, Config
from fsdpctl.config.selection import RECOMPUTATION
from fsdpctl.errors import UsageError
from fsdpctl.estimate.duration import RunTime
from fsdpctl.io.texts import three_digits
from fsdpctl.plan.attention_kernels import TRANSFORMERS
from fsdpctl.plan.optimizers import get_optimizer
from fsdpctl.plan.recomputation import BLOCKS, MODES, Recomputation
from fsdpctl.plan.strategy import DDP, FSDPCTL, Offload, get_strategy, sharded_over_replicas
from fsdpctl.resolve.auto_values import AutoInputs, Stage, fill_auto
from fsdpctl.resolve.machine import LOCAL
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan

_MOST_NODES = 1 << 10
_ATTENTION, _PARAM_DTYPE = "model.attention", "precision.param_dtype"
_CHUNK = 1024
_LORA_RANK = 16
# Tokens. For shorter samples, neither context parallelism nor a chunked MLP is suggested.
LONG_SAMPLE = 1 << 14

KeyValues = Mapping[str, Any]  # the values of settings by their key; None: auto


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The changed settings of a run, and their cost."""

    values: KeyValues
    extra_work: str  # the work that takes more time; empty: none
    plan: RunPlan  # with the changed settings
    effect: str = ""  # change of the training itself
    time: RunTime | None = None  # with the changed settings; None: not predicted

    @property
    def figures(self) -> str:
        """The predicted time and price, or else the additional work; then the effect."""
        figures = self.extra_work
        if (time := self.time) is not None:
            totals = time.texts("gpu_hours", "cost")
            figures = ", ".join([f"{three_digits(time.step_seconds)} s/step", *totals])
        return "; ".join(filter(None, [figures, self.effect]))

    @property
    def settings(self) -> tuple[str, ...]:
        """The changed settings as the command line takes them, such as `strategy=full_shard`."""
        texts = ((k, v if k in GROUPS else KEYS[k].text(v) or NONE) for k, v in self.values.items())
        return tuple(f"{key}={text}" for key, text in texts)


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """A setting that saves memory, and what it costs."""

    extra_work: str
    # The values for a plan, the last of which saves most; none if the setting does not apply.
    values: Callable[[RunPlan], Iterable[KeyValues]]
    effect: str = ""

    def suggestions(self, plan: RunPlan) -> Iterator[Suggestion]:
        """Yield a suggestion for each value that does not conflict with other settings."""
        for values in self.values(plan):
            with suppress(UsageError):
                yield Suggestion(values, self.extra_work, changed_plan(plan, values), self.effect)


def changed_plan(plan: RunPlan, values: KeyValues) -> RunPlan:
    """Return a plan with other values; UsageError if they conflict with other settings."""
    config = plan.requested.changed(values)
    # `auto` selects a kernel by the dtype, which may have changed, but TRANSFORMERS by the model.
    if config.is_auto(_ATTENTION) and config.model.attention not in (None, TRANSFORMERS):
        has_gpu = config.cluster.name == LOCAL and torch.cuda.is_available()
        config = fill_auto(config.changed({_ATTENTION: None}), Stage.DECODER, AutoInputs(has_gpu))
    return make_run_plan(config.with_strategy(config.strategy.name))  # drops unused keys


def _value_if(applies: bool, key: str, value: object) -> list[KeyValues]:
    return [{key: value}] if applies else []


def _unless_set(config: Config, key: str, value: object) -> list[KeyValues]:
    is_unset = config.value(key) == KEYS[key].default and not config.is_typed(key)
    return _value_if(is_unset, key, value)


def _unset_accumulation_steps(plan: RunPlan) -> dict[str, Any]:
    """Return the value with which the number of micro-batches is computed, if it is set."""
    return {} if plan.requested.accumulation.steps is None else {"accumulation.steps": None}


def _chunked_loss(plan: RunPlan) -> list[KeyValues]:
    train = plan.config.train
    is_long = plan.batches.micro_batch_size * train.seq_len >= 2 * _CHUNK
    return _value_if(is_long and train.loss_chunk_tokens == 0, "train.loss_chunk_tokens", _CHUNK)


def _sharded_over_replicas(plan: RunPlan) -> list[KeyValues]:
    config = plan.config
    strategy = sharded_over_replicas(get_strategy(config.strategy.name))
    has_replicas = config.strategy.dp_shard_size != config.num_ranks
    if strategy is None or config.engine.name != FSDPCTL or not has_replicas:
        return []
    return [{"strategy": strategy.name}]


def _full_shard(plan: RunPlan) -> list[KeyValues]:
    config = plan.config
    strategy = get_strategy(config.strategy.name)
    # `full_shard` cuts matrices, which Muon updates as a whole.
    if strategy.is_fully_sharded or get_optimizer(config.optimizer.name).steps_matrices:
        return []
    size = {} if plan.requested.strategy.dp_shard_size is None else {"strategy.dp_shard_size": None}
    engine = {"engine": FSDPCTL} if config.engine.name == DDP else {}
    return [{"strategy": "full_shard", **size, **engine}]


def micro_batches(plan: RunPlan, sizes: Iterable[int]) -> list[KeyValues]:
    """Return the values for `sizes` of micro-batches that are below the size of a plan."""
    steps, current = _unset_accumulation_steps(plan), plan.batches.micro_batch_size
    return [{"train.micro_batch_size": size, **steps} for size in sizes if size < current]


def halves(plan: RunPlan) -> list[int]:
    """Return the size of a plan's micro-batch, halved once, twice and so on down to 1."""
    size = plan.batches.micro_batch_size
    return [size >> times for times in range(1, size.bit_length())]


def _context_parallel(plan: RunPlan) -> Iterator[KeyValues]:
    config = plan.config
    train, on_node = config.train, config.launch.nproc_per_node or 1
    if train.seq_len < LONG_SAMPLE or config.engine.name != FSDPCTL:
        return
    for count in range(2 * train.context_parallel, on_node + 1):
        if on_node % count == 0 and config.model.num_heads % count == 0:
            values = {"train.context_parallel": count, **_unset_accumulation_steps(plan)}
            # If unset, the size would grow: ranks that share samples also run each other's samples.
            if plan.requested.train.micro_batch_size is None:
                values["train.micro_batch_size"] = plan.batches.micro_batch_size
            yield values


def _chunked_mlp(plan: RunPlan) -> list[KeyValues]:
    train = plan.config.train
    is_long = train.seq_len >= LONG_SAMPLE * train.context_parallel
    is_whole = plan.requested.train.mlp_chunk_tokens == 0
    return _value_if(is_long and is_whole, "train.mlp_chunk_tokens", value=None)


def _recompute_all(mode: str, plan: RunPlan) -> list[KeyValues]:
    """Return the value with which all blocks are recomputed in `mode`, if it saves memory."""
    saves = MODES.index(plan.config.activation_checkpointing.name) < MODES.index(mode)
    return [recomputation_values(plan, Recomputation(mode))] if saves else []


def recomputation_values(plan: RunPlan, recomputation: Recomputation) -> KeyValues:
    """Return the values of a recomputation that differ from those of a plan."""
    values = {RECOMPUTATION: recomputation.name, BLOCKS: recomputation.blocks}
    return {key: value for key, value in values.items() if plan.config.value(key) != value}


def _int8_states(plan: RunPlan) -> list[KeyValues]:
    config = plan.config
    if config.model.lora.rank is not None or config.precision.master_dtype != "float32":
        return []
    return _unless_set(config, "optimizer.state_dtype", "int8")


def _param_offload(plan: RunPlan) -> list[KeyValues]:
    config = plan.config
    on_host = config.strategy.offloaded
    if Offload.PARAMS in on_host or not get_strategy(config.strategy.name).can_offload_params:
        return []
    # Without the states, `params` is only valid with frozen parameters.
    applies = Offload.STATES in on_host or config.model.lora.rank is not None
    return _value_if(applies, "strategy.offload", str(on_host | Offload.PARAMS))


def _offload(added: Offload, plan: RunPlan) -> list[KeyValues]:
    """Return the value with which the host steps the optimizer, if the device steps it now."""
    on_host = plan.config.strategy.offloaded
    return _value_if(Offload.STATES not in on_host, "strategy.offload", str(on_host | added))


def _adapters(plan: RunPlan) -> list[KeyValues]:
    config = plan.config
    if config.model.lora.rank is not None or config.engine.name != FSDPCTL:
        return []
    nf4, full = {"model.base_dtype": "nf4"}, recomputation_values(plan, Recomputation("full"))
    return [{"model.lora.rank": _LORA_RANK, **x} for x in ({}, full, nf4, {**nf4, **full})]


def more_nodes(plan: RunPlan) -> Iterator[Suggestion]:
    """Yield suggestions of 2, 4, 8 … times the nodes; each rank has at least a part of a sample."""
    config = plan.config
    train, nodes = config.train, 2 * config.launch.nnodes
    while nodes <= _MOST_NODES:
        degree = config.data_parallel_size * nodes // config.launch.nnodes
        effect = f"{degree * train.context_parallel} ranks"
        values = {"launch.nnodes": nodes, **_unset_accumulation_steps(plan)}
        if train.global_batch_size < degree:
            values["train.global_batch_size"] = degree
            effect += f", {degree} samples per step"
        share = -(-max(train.global_batch_size, degree) // degree)
        size = plan.requested.train.micro_batch_size
        if size is not None and size > share:
            values["train.micro_batch_size"] = share
        with suppress(UsageError):
            yield Suggestion(values, "", changed_plan(plan, values), effect)
        nodes *= 2


_OFFLOADED = "the optimizer steps on the host"
EXPANDABLE_SEGMENTS = MemorySaving(
    "", lambda p: _value_if(p.config.launch.allocator == "native", "launch.allocator", "expandable")
)
CHUNKED_LOSS = MemorySaving("the logits are computed twice", _chunked_loss)
REDUCE_EVERY_MICRO_BATCH = MemorySaving(
    "gradients are reduced in each micro-batch",
    lambda p: _value_if(
        p.config.accumulation.name == "last" and p.batches.num_micro_batches > 1,
        "accumulation",
        "every",
    ),
)
SHARD_OVER_REPLICAS = MemorySaving("replicas exchange updated parameters", _sharded_over_replicas)
FULL_SHARD = MemorySaving("units are gathered twice", _full_shard)
SELECTIVE_RECOMPUTATION = MemorySaving(
    "every second matrix product is recomputed", partial(_recompute_all, "selective")
)
FULL_RECOMPUTATION = MemorySaving("a third more computation", partial(_recompute_all, "full"))
_MORE_PASSES = "more, smaller micro-batches per step"
SMALLER_MICRO_BATCH = MemorySaving(_MORE_PASSES, lambda p: micro_batches(p, halves(p)))
MICRO_BATCH_OF_ONE = MemorySaving(_MORE_PASSES, lambda p: micro_batches(p, [1]))
CONTEXT_PARALLEL = MemorySaving(
    "ranks share each sample, and exchange heads around attention", _context_parallel
)
ACTIVATION_OFFLOAD = MemorySaving(
    "inputs of recomputed blocks are on the host",
    lambda p: _unless_set(p.config, "activation_checkpointing.offload", value=True),
)
CHUNKED_MLP = MemorySaving("feed-forward layers run once more", _chunked_mlp)
INT8_STATES = MemorySaving("", _int8_states, "moments are rounded to 8 bits")
STATE_OFFLOAD = MemorySaving(_OFFLOADED, partial(_offload, Offload.STATES))
GRADIENT_OFFLOAD = MemorySaving(_OFFLOADED, partial(_offload, Offload.STATES | Offload.GRADIENTS))
PARAM_OFFLOAD = MemorySaving("units are gathered from the host", _param_offload)
FOUR_BIT_BASE = MemorySaving(
    "weights are dequantized twice",
    lambda p: _unless_set(p.config, "model.base_dtype", "nf4") if p.config.model.lora.rank else [],
    "frozen weights are rounded to 4 bits",
)
BF16_COMPUTE = MemorySaving(
    "",
    lambda p: _value_if(p.config.value(_PARAM_DTYPE) == "float32", _PARAM_DTYPE, "bfloat16"),
    "computes in bfloat16",
)
ADAPTERS = MemorySaving("", _adapters, "trains adapters alone")
# Settings that a suggestion may combine, the cheapest first.
SAVINGS_TOGETHER = (
    EXPANDABLE_SEGMENTS, CHUNKED_LOSS, REDUCE_EVERY_MICRO_BATCH, SHARD_OVER_REPLICAS, FULL_SHARD,
    SELECTIVE_RECOMPUTATION, FULL_RECOMPUTATION, MICRO_BATCH_OF_ONE, CONTEXT_PARALLEL,
    ACTIVATION_OFFLOAD, CHUNKED_MLP, FOUR_BIT_BASE, BF16_COMPUTE,
)  # fmt: skip
# Settings that may suffice alone, the cheapest first.
SAVINGS_ALONE = (
    EXPANDABLE_SEGMENTS, CHUNKED_LOSS, REDUCE_EVERY_MICRO_BATCH, SHARD_OVER_REPLICAS, INT8_STATES,
    FULL_SHARD, SMALLER_MICRO_BATCH, CONTEXT_PARALLEL, ACTIVATION_OFFLOAD, CHUNKED_MLP,
    STATE_OFFLOAD, GRADIENT_OFFLOAD, PARAM_OFFLOAD, FOUR_BIT_BASE, BF16_COMPUTE,
)  # fmt: skip
# Alternative savings of optimizer states, of which a combination has one or none.
STATE_SAVINGS = ((), (STATE_OFFLOAD,), (GRADIENT_OFFLOAD,), (INT8_STATES,))
