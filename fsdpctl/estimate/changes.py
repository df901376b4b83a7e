"""Changes that let a run need less memory, and their cost."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdpctl.config.schema import GROUPS, KEYS, Config
from fsdpctl.estimate.estimator import batches_of
from fsdpctl.plan.optimizers import get_optimizer
from fsdpctl.plan.sizes import Offload
from fsdpctl.plan.strategy import DDP, FSDPCTL, get_strategy, sharded_over_copies
from fsdpctl.resolve.loss_chunks import loss_chunk_tokens
from fsdpctl.resolve.machine import resolved_strategy, sample_groups, world_size

_MOST_NODES = 1 << 10
_CHUNK = 1024  # tokens
_RANK = 16  # of adapters
LONG = 1 << 14  # tokens; shorter samples are neither shared nor run in chunks


@dataclass(frozen=True, slots=True)
class Change:
    """Changed settings, and their cost."""

    words: tuple[str, ...]  # the settings
    cost: str
    config: Config  # with it

    @property
    def keys(self) -> set[str]:
        """The keys of the settings."""
        return {word.split("=")[0] for word in self.words}


def _changed(config: Config, cost: str, values: Mapping[str, Any]) -> Change:
    """Return `config` with `values` by key, as the command line would set them; None: auto."""
    texts = {
        key: value if key in GROUPS else KEYS[key].text(value) for key, value in values.items()
    }
    words = tuple(f"{key}={text}" for key, text in texts.items())
    for key, value in values.items():
        config = _set(config, (key if "." in key else f"{key}.name").split("."), value)
    given = config.strategy.under(config.strategy.name)
    return Change(words, cost, replace(config, strategy=resolved_strategy(config, given)))


def _set(part: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return replace(part, **{first: _set(getattr(part, first), rest, value) if rest else value})


def expandable(config: Config) -> Iterator[Change]:
    """Yield the allocator with expandable segments."""
    if config.launch.allocator != "expandable":
        yield _changed(config, "nothing", {"launch.allocator": "expandable"})


def chunked(config: Config) -> Iterator[Change]:
    """Yield logits of some tokens at a time."""
    samples = batches_of(config).micro_batch_size
    is_long = samples * config.train.seq_len >= 2 * _CHUNK
    if is_long and loss_chunk_tokens(config, samples) == 0:
        cost = "the logits are computed twice"
        yield _changed(config, cost, {"train.loss_chunk_tokens": _CHUNK})


def reduced_every_time(config: Config) -> Iterator[Change]:
    """Yield a reduction of each micro-batch."""
    passes = batches_of(config).num_micro_batches
    if config.accumulation.name == "last" and passes > 1:
        cost = f"gradients are reduced {passes} times per step instead of once"
        yield _changed(config, cost, {"accumulation": "every"})


def shared_out(config: Config) -> Iterator[Change]:
    """Yield states sharded over replicas."""
    given = config.strategy
    row = sharded_over_copies(get_strategy(given.name))
    if row is None or config.engine.name != FSDPCTL or given.dp_shard_size == world_size(config):
        return
    cost = "replicas shard gradients and optimizer states, and exchange updated parameters"
    yield _changed(config, cost, {"strategy": row.name})


def fully_sharded(config: Config) -> Iterator[Change]:
    """Yield full sharding."""
    row = get_strategy(config.strategy.name)
    if row.is_fully_sharded or get_optimizer(config.optimizer.name).steps_matrices:
        return
    values: dict[str, Any] = {"strategy": "full_shard"}
    if config.strategy.dp_shard_size is not None:
        values["strategy.dp_shard_size"] = None
    if config.engine.name == DDP:
        values["engine"] = FSDPCTL
    cost = "all ranks share one replica; each unit is gathered in forward and again in backward"
    yield _changed(config, cost, values)


def recomputed_in_part(config: Config) -> Iterator[Change]:
    """Yield selective activation checkpointing."""
    if config.activation_checkpointing.name == "none":
        cost = "every second matrix product is recomputed"
        yield _changed(config, cost, {"activation_checkpointing": "selective"})


def recomputed(config: Config) -> Iterator[Change]:
    """Yield full activation checkpointing."""
    if config.activation_checkpointing.name != "full":
        cost = "a third more computation: the forward of blocks runs twice"
        yield _changed(config, cost, {"activation_checkpointing": "full"})


def smaller_batch(config: Config) -> Iterator[Change]:
    """Yield smaller micro-batches."""
    size = batches_of(config).micro_batch_size // 2
    while size:
        yield from micro_batches(config, size)
        size //= 2


def micro_batches(config: Config, size: int) -> Iterator[Change]:
    """Yield micro-batches of `size` samples, if they have more."""
    if batches_of(config).micro_batch_size > size:
        found = _changed(config, "", {"train.micro_batch_size": size, **_steps_as_needed(config)})
        passes = [batches_of(each).num_micro_batches for each in (found.config, config)]
        cost = f"{passes[0]} smaller micro-batches per step instead of {passes[1]}"
        yield replace(found, cost=cost)


def _steps_as_needed(config: Config) -> dict[str, Any]:
    """Return the setting that resets the number of passes, if it was set."""
    return {} if config.accumulation.steps is None else {"accumulation.steps": None}


def compressed(config: Config) -> Iterator[Change]:
    """Yield moments in 8 bits."""
    about = config.optimizer
    has_key = "state_dtype" in get_optimizer(about.name).keys
    plain = has_key and about.state_dtype is None and config.model.lora.rank is None
    own = config.engine.name == FSDPCTL and about.offload == Offload.NONE
    if plain and own and config.precision.master_dtype == "float32":
        cost = "moments are rounded to 8 bits"
        yield _changed(config, cost, {"optimizer.state_dtype": "int8"})


def states_on_host(config: Config, most: Offload = Offload.ALL) -> Iterator[Change]:
    """Yield states in host memory, and unless `most` are the states, gradients too."""
    about = config.optimizer
    plain = get_optimizer(about.name).offloads and about.state_dtype in (None, "float32")
    if plain and about.offload == Offload.NONE and config.engine.name == FSDPCTL:
        cost = "{} on the host, and the optimizer's step"
        states, gradients = "master weights and moments", "gradients, "
        yield _changed(config, cost.format(states), {"optimizer.offload": "states"})
        if most is Offload.ALL:
            yield _changed(config, cost.format(gradients + states), {"optimizer.offload": "all"})


def activations_on_host(config: Config) -> Iterator[Change]:
    """Yield inputs of blocks in host memory."""
    about = config.activation_checkpointing
    if about.name != "none" and not about.offload and config.engine.name == FSDPCTL:
        cost = "inputs of recomputed blocks are on the host"
        yield _changed(config, cost, {"activation_checkpointing.offload": True})


def shared_samples(config: Config) -> Iterator[Change]:
    """Yield samples shared by ranks of a node, by few first, if they are long."""
    train, each = config.train, config.launch.nproc_per_node or 1
    if train.seq_len < LONG or config.engine.name != FSDPCTL:
        return
    for count in range(2 * train.context_parallel, each + 1):
        if each % count == 0 and config.model.num_heads % count == 0:
            values = {"train.context_parallel": count, **_steps_as_needed(config)}
            if train.micro_batch_size is None:  # a group has more samples than a rank
                values["train.micro_batch_size"] = batches_of(config).micro_batch_size
            cost = f"{count} ranks share each sample, and exchange heads around attention"
            yield _changed(config, cost, values)


def feed_forward_in_chunks(config: Config) -> Iterator[Change]:
    """Yield feed-forward layers that run on some tokens at a time, if samples are long."""
    train = config.train
    if train.seq_len >= LONG * train.context_parallel and train.mlp_chunk_tokens == 0:
        cost = "feed-forward layers run once more, on some tokens at a time"
        yield _changed(config, cost, {"train.mlp_chunk_tokens": None})


def in_four_bits(config: Config) -> Iterator[Change]:
    """Yield frozen weights in 4 bits."""
    if config.model.lora.rank is not None and config.model.base_dtype is None:
        cost = "frozen weights are rounded to 4 bits, and dequantized in forward and backward"
        yield _changed(config, cost, {"model.base_dtype": "nf4"})


def adapters(config: Config) -> Iterator[Change]:
    """Yield LoRA adapters instead of all weights, the frozen ones in 16 and in 4 bits."""
    if config.model.lora.rank is not None or config.engine.name != FSDPCTL:
        return
    for rounded, about in (({}, ""), ({"model.base_dtype": "nf4"}, " and rounded to 4 bits")):
        for more in ({}, {"activation_checkpointing": "full"}):
            cost = f"trains adapters alone: all weights are frozen{about}"
            yield _changed(config, cost, {"model.lora.rank": _RANK, **rounded, **more})


def computed_in_bf16(config: Config) -> Iterator[Change]:
    """Yield computation in bf16."""
    if config.precision.param_dtype == "float32":
        yield _changed(config, "compute in bfloat16", {"precision.param_dtype": "bfloat16"})


def more_nodes(config: Config) -> Iterator[Change]:
    """Yield more nodes, with a sample for each group of ranks."""
    train, nodes = config.train, 2 * config.launch.nnodes
    while nodes <= _MOST_NODES:
        groups = sample_groups(config) * nodes // config.launch.nnodes
        cost = f"{groups * train.context_parallel} ranks"
        values = {"launch.nnodes": nodes, **_steps_as_needed(config)}
        if train.global_batch_size < groups:
            values["train.global_batch_size"] = groups
            cost += f", {groups} samples per step"
        share = -(-max(train.global_batch_size, groups) // groups)
        if train.micro_batch_size is not None and train.micro_batch_size > share:
            values["train.micro_batch_size"] = share
        yield _changed(config, cost, values)
        nodes *= 2
