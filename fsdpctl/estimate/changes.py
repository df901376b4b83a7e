"""Changes that let a run need less memory, and their cost."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fsdpctl.config.auto import MAY_USE, is_set
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.errors import UsageError
from fsdpctl.plan.optimizers import get_optimizer
from fsdpctl.plan.sizes import Offload
from fsdpctl.plan.strategy import DDP, FSDPCTL, get_strategy, sharded_over_copies
from fsdpctl.resolve.machine import sample_groups, world_size
from fsdpctl.resolve.settle import RunPlan, settle

_MOST_NODES = 1 << 10
_CHUNK = 1024  # tokens
_RANK = 16  # of adapters
LONG = 1 << 14  # tokens; shorter samples are neither shared nor run in chunks


@dataclass(frozen=True, slots=True)
class Change:
    """Changed settings, and their cost."""

    words: tuple[str, ...]  # the settings
    cost: str
    plan: RunPlan  # with it

    @property
    def keys(self) -> set[str]:
        """The keys of the settings."""
        return {word.split("=")[0] for word in self.words}


def _changed(plan: RunPlan, cost: str, values: Mapping[str, Any]) -> Iterator[Change]:
    """Yield a plan with `values` by key, as the command line would set them; None: auto.

    Nothing if they conflict with other settings.
    """
    texts = {
        key: value if key in GROUPS else KEYS[key].text(value) for key, value in values.items()
    }
    words = tuple(f"{key}={text}" for key, text in texts.items())
    config = plan.asked
    for key, value in values.items():
        config = _set(config, (key if "." in key else f"{key}.name").split("."), value)
    with suppress(UsageError):
        config = replace(config, strategy=config.strategy.under(config.strategy.name))
        yield Change(words, cost, settle(config))


def _set(part: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return replace(part, **{first: _set(getattr(part, first), rest, value) if rest else value})


def expandable(plan: RunPlan) -> Iterator[Change]:
    """Yield the allocator with expandable segments."""
    config = plan.config
    if config.launch.allocator != "expandable":
        yield from _changed(plan, "nothing", {"launch.allocator": "expandable"})


def chunked(plan: RunPlan) -> Iterator[Change]:
    """Yield logits of some tokens at a time."""
    train = plan.config.train
    is_long = plan.batches.micro_batch_size * train.seq_len >= 2 * _CHUNK
    if is_long and train.loss_chunk_tokens == 0:
        cost = "the logits are computed twice"
        yield from _changed(plan, cost, {"train.loss_chunk_tokens": _CHUNK})


def reduced_every_time(plan: RunPlan) -> Iterator[Change]:
    """Yield a reduction of each micro-batch."""
    config = plan.config
    passes = plan.batches.num_micro_batches
    if config.accumulation.name == "last" and passes > 1:
        cost = f"gradients are reduced {passes} times per step instead of once"
        yield from _changed(plan, cost, {"accumulation": "every"})


def shared_out(plan: RunPlan) -> Iterator[Change]:
    """Yield states sharded over replicas."""
    config = plan.config
    given = config.strategy
    row = sharded_over_copies(get_strategy(given.name))
    if row is None or config.engine.name != FSDPCTL or given.dp_shard_size == world_size(config):
        return
    cost = "replicas shard gradients and optimizer states, and exchange updated parameters"
    yield from _changed(plan, cost, {"strategy": row.name})


def fully_sharded(plan: RunPlan) -> Iterator[Change]:
    """Yield full sharding."""
    config = plan.config
    row = get_strategy(config.strategy.name)
    if row.is_fully_sharded or get_optimizer(config.optimizer.name).steps_matrices:
        return
    values: dict[str, Any] = {"strategy": "full_shard"}
    if plan.asked.strategy.dp_shard_size is not None:
        values["strategy.dp_shard_size"] = None
    if config.engine.name == DDP:
        values["engine"] = FSDPCTL
    cost = "all ranks share one replica; each unit is gathered in forward and again in backward"
    yield from _changed(plan, cost, values)


def recomputed_in_part(plan: RunPlan) -> Iterator[Change]:
    """Yield selective activation checkpointing."""
    config = plan.config
    if config.activation_checkpointing.name == "none":
        cost = "every second matrix product is recomputed"
        yield from _changed(plan, cost, {"activation_checkpointing": "selective"})


def recomputed(plan: RunPlan) -> Iterator[Change]:
    """Yield full activation checkpointing."""
    config = plan.config
    if config.activation_checkpointing.name != "full":
        cost = "a third more computation: the forward of blocks runs twice"
        yield from _changed(plan, cost, {"activation_checkpointing": "full"})


def smaller_batch(plan: RunPlan) -> Iterator[Change]:
    """Yield smaller micro-batches."""
    size = plan.batches.micro_batch_size // 2
    while size:
        yield from micro_batches(plan, size)
        size //= 2


def micro_batches(plan: RunPlan, size: int) -> Iterator[Change]:
    """Yield micro-batches of `size` samples, if they have more."""
    if plan.batches.micro_batch_size > size:
        values = {"train.micro_batch_size": size, **_steps_as_needed(plan)}
        for found in _changed(plan, "", values):
            passes = [each.batches.num_micro_batches for each in (found.plan, plan)]
            cost = f"{passes[0]} smaller micro-batches per step instead of {passes[1]}"
            yield replace(found, cost=cost)


def _steps_as_needed(plan: RunPlan) -> dict[str, Any]:
    """Return the setting that resets the number of passes, if it was set."""
    return {} if plan.asked.accumulation.steps is None else {"accumulation.steps": None}


def _allowed(plan: RunPlan, word: str, *costs: str) -> Iterator[Change]:
    """Yield what `auto.may_use=WORD` allows, unless the key is set; each value has a cost."""
    key, values = MAY_USE[word]
    if not is_set(plan.config, key):
        for value, cost in zip(values, costs, strict=False):
            yield from _changed(plan, cost, {key: KEYS[key].parse(value)})


def compressed(plan: RunPlan) -> Iterator[Change]:
    """Yield moments in 8 bits."""
    config = plan.config
    if config.model.lora.rank is None and config.precision.master_dtype == "float32":
        yield from _allowed(plan, "state_dtype", "moments are rounded to 8 bits")


def states_on_host(plan: RunPlan, most: Offload = Offload.ALL) -> Iterator[Change]:
    """Yield states in host memory, and unless `most` are the states, gradients too."""
    cost = "master weights and moments on the host, and the optimizer's step"
    costs = (cost, f"gradients, {cost}")
    yield from _allowed(plan, "offload", *costs[: 1 if most is Offload.STATES else 2])


def params_on_host(plan: RunPlan) -> Iterator[Change]:
    """Yield parameters in host memory, unless all are trained with master weights on the device."""
    config = plan.config
    can_rest = config.optimizer.offload != Offload.NONE or config.model.lora.rank is not None
    if can_rest and get_strategy(config.strategy.name).can_offload_params:
        cost = "parameters rest on the host, from where each unit is gathered"
        yield from _allowed(plan, "offload_params", cost)


def activations_on_host(plan: RunPlan) -> Iterator[Change]:
    """Yield inputs of blocks in host memory."""
    yield from _allowed(plan, "activation_offload", "inputs of recomputed blocks are on the host")


def shared_samples(plan: RunPlan) -> Iterator[Change]:
    """Yield samples shared by ranks of a node, by few first, if they are long."""
    config = plan.config
    train, each = config.train, config.launch.nproc_per_node or 1
    if train.seq_len < LONG or config.engine.name != FSDPCTL:
        return
    for count in range(2 * train.context_parallel, each + 1):
        if each % count == 0 and config.model.num_heads % count == 0:
            values = {"train.context_parallel": count, **_steps_as_needed(plan)}
            if plan.asked.train.micro_batch_size is None:  # a group has more samples than a rank
                values["train.micro_batch_size"] = plan.batches.micro_batch_size
            cost = f"{count} ranks share each sample, and exchange heads around attention"
            yield from _changed(plan, cost, values)


def feed_forward_in_chunks(plan: RunPlan) -> Iterator[Change]:
    """Yield feed-forward layers that run on some tokens at a time, if samples are long."""
    config = plan.config
    train = config.train
    if train.seq_len >= LONG * train.context_parallel and plan.asked.train.mlp_chunk_tokens == 0:
        cost = "feed-forward layers run once more, on some tokens at a time"
        yield from _changed(plan, cost, {"train.mlp_chunk_tokens": None})


def in_four_bits(plan: RunPlan) -> Iterator[Change]:
    """Yield frozen weights in 4 bits."""
    if plan.config.model.lora.rank is not None:
        cost = "frozen weights are rounded to 4 bits, and dequantized in forward and backward"
        yield from _allowed(plan, "base_dtype", cost)


def adapters(plan: RunPlan) -> Iterator[Change]:
    """Yield LoRA adapters instead of all weights, the frozen ones in 16 and in 4 bits."""
    config = plan.config
    if config.model.lora.rank is not None or config.engine.name != FSDPCTL:
        return
    for rounded, about in (({}, ""), ({"model.base_dtype": "nf4"}, " and rounded to 4 bits")):
        for more in ({}, {"activation_checkpointing": "full"}):
            cost = f"trains adapters alone: all weights are frozen{about}"
            yield from _changed(plan, cost, {"model.lora.rank": _RANK, **rounded, **more})


def computed_in_bf16(plan: RunPlan) -> Iterator[Change]:
    """Yield computation in bf16."""
    config = plan.config
    if config.precision.param_dtype == "float32":
        yield from _changed(plan, "compute in bfloat16", {"precision.param_dtype": "bfloat16"})


def more_nodes(plan: RunPlan) -> Iterator[Change]:
    """Yield more nodes, with a sample for each group of ranks."""
    config = plan.config
    train, nodes = config.train, 2 * config.launch.nnodes
    while nodes <= _MOST_NODES:
        groups = sample_groups(config) * nodes // config.launch.nnodes
        cost = f"{groups * train.context_parallel} ranks"
        values = {"launch.nnodes": nodes, **_steps_as_needed(plan)}
        if train.global_batch_size < groups:
            values["train.global_batch_size"] = groups
            cost += f", {groups} samples per step"
        share = -(-max(train.global_batch_size, groups) // groups)
        given = plan.asked.train.micro_batch_size
        if given is not None and given > share:
            values["train.micro_batch_size"] = share
        yield from _changed(plan, cost, values)
        nodes *= 2
