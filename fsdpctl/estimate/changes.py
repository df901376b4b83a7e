"""Settings that let a run need less memory, and their cost."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fsdpctl.config.auto import RECOMPUTATION
from fsdpctl.config.keys import NONE
from fsdpctl.config.schema import GROUPS, KEYS, Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.duration import RunTime
from fsdpctl.io.texts import figure
from fsdpctl.plan.attention_kernels import THEIRS
from fsdpctl.plan.optimizers import get_optimizer
from fsdpctl.plan.recomputation import BLOCKS, MODES, Recomputation
from fsdpctl.plan.strategy import DDP, FSDPCTL, Offload, get_strategy, sharded_over_replicas
from fsdpctl.resolve.auto_values import Facts, Stage, filled
from fsdpctl.resolve.place import LOCAL
from fsdpctl.resolve.settle import RunPlan, settle

_MOST_NODES = 1 << 10
_KERNEL = "model.attention"
_CHUNK = 1024  # tokens
_RANK = 16  # of adapters
LONG = 1 << 14  # tokens; shorter samples are neither shared nor run in chunks

Values = Mapping[str, Any]  # by key, as the command line would set them; None: auto


@dataclass(frozen=True, slots=True)
class Change:
    """Changed settings, and their cost."""

    values: Values
    cost: str  # in time, in words
    plan: RunPlan  # with them
    effect: str = ""  # on what is trained
    time: RunTime | None = None  # with them; None: not predicted

    @property
    def figures(self) -> str:
        """Its predicted time and cost, or in words, and its effect."""
        shown = [self.cost]
        if self.time is not None:
            shown = [f"{figure(self.time.step_seconds)} s/step"]
            shown += self.time.texts("gpu_hours", "cost")
        return "; ".join(filter(None, [", ".join(shown), self.effect]))

    @property
    def words(self) -> tuple[str, ...]:
        texts = ((k, v if k in GROUPS else KEYS[k].text(v) or NONE) for k, v in self.values.items())
        return tuple(f"{key}={text}" for key, text in texts)


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting to save memory with: its values for a plan, of which the last saves most."""

    cost: str
    values: Callable[[RunPlan], Iterable[Values]]  # none if it does not apply
    effect: str = ""

    def changes(self, plan: RunPlan) -> Iterator[Change]:
        """Yield the changed plans, without those that conflict with other settings."""
        for values in self.values(plan):
            with suppress(UsageError):
                yield Change(values, self.cost, changed(plan, values), self.effect)


def changed(plan: RunPlan, values: Values) -> RunPlan:
    """Return a plan with other values; UsageError if they conflict with other settings."""
    config = plan.requested.changed(values)
    if config.is_auto(_KERNEL) and config.model.attention not in (None, THEIRS):  # by the dtype
        is_here = config.cluster.name == LOCAL and torch.cuda.is_available()
        config = filled(config.changed({_KERNEL: None}), Stage.DECODER, Facts(is_here))
    return settle(config.under(config.strategy.name))


def _unless_set(config: Config, key: str, *values: object) -> list[Values]:
    is_unset = config.value(key) == KEYS[key].default and not config.is_typed(key)
    return [{key: value} for value in values] if is_unset else []


def _when(applies: bool, **values: Any) -> list[Values]:
    return [{key.replace("__", "."): value for key, value in values.items()}] if applies else []


def _passes_as_needed(plan: RunPlan) -> dict[str, Any]:
    """Return the setting that resets the number of passes, if it was set."""
    return {} if plan.requested.accumulation.steps is None else {"accumulation.steps": None}


def _chunked(plan: RunPlan) -> list[Values]:
    train = plan.config.train
    is_long = plan.batches.micro_batch_size * train.seq_len >= 2 * _CHUNK
    return _when(is_long and train.loss_chunk_tokens == 0, train__loss_chunk_tokens=_CHUNK)


def _shared_out(plan: RunPlan) -> list[Values]:
    given = plan.config.strategy
    row = sharded_over_replicas(get_strategy(given.name))
    is_one = given.dp_shard_size == plan.config.num_ranks
    if row is None or plan.config.engine.name != FSDPCTL or is_one:
        return []
    return [{"strategy": row.name}]


def _fully_sharded(plan: RunPlan) -> list[Values]:
    config = plan.config
    row = get_strategy(config.strategy.name)
    if row.is_fully_sharded or get_optimizer(config.optimizer.name).steps_matrices:
        return []
    sizes = (
        {} if plan.requested.strategy.dp_shard_size is None else {"strategy.dp_shard_size": None}
    )
    engine = {"engine": FSDPCTL} if config.engine.name == DDP else {}
    return [{"strategy": "full_shard", **sizes, **engine}]


def micro_batches(plan: RunPlan, sizes: Iterable[int]) -> list[Values]:
    more = _passes_as_needed(plan)
    now = plan.batches.micro_batch_size
    return [{"train.micro_batch_size": size, **more} for size in sizes if size < now]


def halves(plan: RunPlan) -> list[int]:
    """Return the sizes of micro-batches below that of a plan, each half of the one before."""
    size = plan.batches.micro_batch_size
    return [size >> times for times in range(1, size.bit_length())]


def _shared_samples(plan: RunPlan) -> Iterator[Values]:
    config = plan.config
    train, each = config.train, config.launch.nproc_per_node or 1
    if train.seq_len < LONG or config.engine.name != FSDPCTL:
        return
    for count in range(2 * train.context_parallel, each + 1):
        if each % count == 0 and config.model.num_heads % count == 0:
            values = {"train.context_parallel": count, **_passes_as_needed(plan)}
            if (
                plan.requested.train.micro_batch_size is None
            ):  # a group has more samples than a rank
                values["train.micro_batch_size"] = plan.batches.micro_batch_size
            yield values


def _feed_forward_in_chunks(plan: RunPlan) -> list[Values]:
    train = plan.config.train
    is_long = train.seq_len >= LONG * train.context_parallel
    is_whole = plan.requested.train.mlp_chunk_tokens == 0
    return _when(is_long and is_whole, train__mlp_chunk_tokens=None)


def _recomputed(mode: str) -> Callable[[RunPlan], list[Values]]:
    """Return the values of a knob that recomputes all blocks in a mode."""

    def values(plan: RunPlan) -> list[Values]:
        now = plan.config.activation_checkpointing
        more = MODES.index(now.name) < MODES.index(mode)
        return [recomputed(plan, Recomputation(mode))] if more else []

    return values


def recomputed(plan: RunPlan, recomputation: Recomputation) -> Values:
    """Return the settings of a recomputation, without what a plan has already."""
    values = {RECOMPUTATION: recomputation.name, BLOCKS: recomputation.blocks}
    return {key: value for key, value in values.items() if plan.config.value(key) != value}


def _compressed(plan: RunPlan) -> list[Values]:
    config = plan.config
    if config.model.lora.rank is not None or config.precision.master_dtype != "float32":
        return []
    return _unless_set(config, "optimizer.state_dtype", "int8")


def _params_on_host(plan: RunPlan) -> list[Values]:
    config = plan.config
    on_host = config.strategy.on_host
    can_rest = Offload.STATES in on_host or config.model.lora.rank is not None
    can_rest &= get_strategy(config.strategy.name).can_offload_params
    rests = Offload.PARAMS in on_host
    return _when(can_rest and not rests, strategy__offload=str(on_host | Offload.PARAMS))


def _on_host(what: Offload) -> Callable[[RunPlan], list[Values]]:
    """Return the values of a knob that has the host step."""

    def values(plan: RunPlan) -> list[Values]:
        on_host = plan.config.strategy.on_host
        return _when(Offload.STATES not in on_host, strategy__offload=str(on_host | what))

    return values


def _adapters(plan: RunPlan) -> list[Values]:
    config = plan.config
    if config.model.lora.rank is not None or config.engine.name != FSDPCTL:
        return []
    rounded, full = {"model.base_dtype": "nf4"}, recomputed(plan, Recomputation("full"))
    more: tuple[Values, ...] = ({}, full, rounded, {**rounded, **full})
    return [{"model.lora.rank": _RANK, **each} for each in more]


def more_nodes(plan: RunPlan) -> Iterator[Change]:
    """Yield more nodes, with a sample for each group of ranks."""
    config = plan.config
    train, nodes = config.train, 2 * config.launch.nnodes
    while nodes <= _MOST_NODES:
        groups = config.num_groups * nodes // config.launch.nnodes
        effect = f"{groups * train.context_parallel} ranks"
        values = {"launch.nnodes": nodes, **_passes_as_needed(plan)}
        if train.global_batch_size < groups:
            values["train.global_batch_size"] = groups
            effect += f", {groups} samples per step"
        share = -(-max(train.global_batch_size, groups) // groups)
        given = plan.requested.train.micro_batch_size
        if given is not None and given > share:
            values["train.micro_batch_size"] = share
        with suppress(UsageError):
            yield Change(values, "", changed(plan, values), effect)
        nodes *= 2


_OFFLOADED = "the optimizer steps on the host"
EXPANDABLE = Knob(
    "", lambda p: _when(p.config.launch.allocator == "native", launch__allocator="expandable")
)
CHUNKED = Knob("the logits are computed twice", _chunked)
REDUCED_EVERY_TIME = Knob(
    "gradients are reduced in each micro-batch",
    lambda p: _when(
        p.config.accumulation.name == "last" and p.batches.num_micro_batches > 1,
        accumulation="every",
    ),
)
SHARED_OUT = Knob("replicas exchange updated parameters", _shared_out)
FULLY_SHARDED = Knob("units are gathered twice", _fully_sharded)
RECOMPUTED_IN_PART = Knob("every second matrix product is recomputed", _recomputed("selective"))
RECOMPUTED = Knob("a third more computation", _recomputed("full"))
SMALLER_BATCH = Knob("more, smaller micro-batches per step", lambda p: micro_batches(p, halves(p)))
SINGLE_SAMPLE = Knob("more, smaller micro-batches per step", lambda p: micro_batches(p, [1]))
SHARED_SAMPLES = Knob(
    "ranks share each sample, and exchange heads around attention", _shared_samples
)
ACTIVATIONS_ON_HOST = Knob(
    "inputs of recomputed blocks are on the host",
    lambda p: _unless_set(p.config, "activation_checkpointing.offload", True),
)
FEED_FORWARD_IN_CHUNKS = Knob("feed-forward layers run once more", _feed_forward_in_chunks)
COMPRESSED = Knob("", _compressed, "moments are rounded to 8 bits")
STATES_ON_HOST = Knob(_OFFLOADED, _on_host(Offload.STATES))
GRADIENTS_ON_HOST = Knob(_OFFLOADED, _on_host(Offload.STATES | Offload.GRADIENTS))
PARAMS_ON_HOST = Knob("units are gathered from the host", _params_on_host)
IN_FOUR_BITS = Knob(
    "weights are dequantized twice",
    lambda p: _unless_set(p.config, "model.base_dtype", "nf4") if p.config.model.lora.rank else [],
    "frozen weights are rounded to 4 bits",
)
COMPUTED_IN_BF16 = Knob(
    "",
    lambda p: _when(p.config.precision.param_dtype == "float32", precision__param_dtype="bfloat16"),
    "computes in bfloat16",
)
ADAPTERS = Knob("", _adapters, "trains adapters alone")
# What costs least first.
TOGETHER = (
    EXPANDABLE, CHUNKED, REDUCED_EVERY_TIME, SHARED_OUT, FULLY_SHARDED, RECOMPUTED_IN_PART,
    RECOMPUTED, SINGLE_SAMPLE, SHARED_SAMPLES, ACTIVATIONS_ON_HOST, FEED_FORWARD_IN_CHUNKS,
    IN_FOUR_BITS, COMPUTED_IN_BF16,
)  # fmt: skip
SINGLE = (
    EXPANDABLE, CHUNKED, REDUCED_EVERY_TIME, SHARED_OUT, COMPRESSED, FULLY_SHARDED, SMALLER_BATCH,
    SHARED_SAMPLES, ACTIVATIONS_ON_HOST, FEED_FORWARD_IN_CHUNKS, STATES_ON_HOST, GRADIENTS_ON_HOST,
    PARAMS_ON_HOST, IN_FOUR_BITS, COMPUTED_IN_BF16,
)  # fmt: skip
STATES = ((), (STATES_ON_HOST,), (GRADIENTS_ON_HOST,), (COMPRESSED,))  # treatments of them
