"""Changes with which a run fits, and their cost."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdpctl.config.schema import GROUPS, KEYS, Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator, batches_of
from fsdpctl.estimate.hardware import with_speed
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.plan.muon import MUON
from fsdpctl.plan.sizes import Offload
from fsdpctl.plan.strategy import DDP, FSDPCTL, get_strategy, sharded_over_copies
from fsdpctl.resolve.loss_chunks import loss_chunk_tokens
from fsdpctl.resolve.machine import resolved_strategy, world_size
from fsdpctl.resolve.preflight import check_offload, check_optimizer

_CHANGES = 3
_ACCURACY = 0.01  # of a predicted time
_MOST_NODES = 1 << 10
_CHUNK = 1024  # tokens


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


def advice(
    estimator: Estimator, config: Config, *, more_ranks: bool = True
) -> list[tuple[Change, RunEstimate]]:
    """Return up to three changes that make a resolved configuration fit, cheapest first.

    Single changes are ordered by the predicted step time, or if the hardware is not specified by
    what they cost: nothing, a little time, communication, computation. Then follow several together
    and (with `more_ranks`) more ranks.
    """
    single = [each for make in (*_MAKERS, _computed_in_bf16) for each in make(config)]
    found: list[tuple[Change, RunEstimate]] = []
    for each in _by_time(estimator, list(_fitting(estimator, single))):
        if not any(each[0].keys == faster.keys for faster, _ in found):
            found.append(each)
    if len(found) >= _CHANGES:
        return found[:_CHANGES]
    for change, estimate in _fitting(estimator, _together(config, more_ranks=more_ranks)):
        if any(set(cheaper.words) <= set(change.words) for cheaper, _ in found):
            continue  # it includes a change that suffices
        found.append((change, estimate))
        if len(found) == _CHANGES or _adds_ranks(change):
            break
    return found


def _fitting(
    estimator: Estimator, changes: Iterable[Change]
) -> Iterator[tuple[Change, RunEstimate]]:
    """Yield the changes with which a run fits, and its estimate."""
    for change in changes:
        try:
            check_optimizer(change.config)
            check_offload(change.config)
            estimate = estimator.estimate(change.config)
        except UsageError:
            continue
        if estimate.verdict == "fits":
            yield change, estimate


def _by_time(
    estimator: Estimator, found: list[tuple[Change, RunEstimate]]
) -> list[tuple[Change, RunEstimate]]:
    """Sort changes by the predicted step time, those that only differ by its accuracy as before."""
    if len(found) < 2:
        return found
    try:
        times = [estimator.predict(with_speed(change.config)[0]).seconds for change, _ in found]
    except UsageError:  # the hardware is not specified
        return found
    ranks = [math.floor(math.log(seconds) / math.log1p(_ACCURACY)) for seconds in times]
    return [each for _, each in sorted(zip(ranks, found, strict=True), key=lambda pair: pair[0])]


def _adds_ranks(change: Change) -> bool:
    return any(word.startswith("launch.nnodes=") for word in change.words)


def _together(config: Config, *, more_ranks: bool) -> Iterator[Change]:
    """Yield more and more changes together, then more nodes."""
    parts: list[Change] = []
    together = Change((), "", config)
    for make in (
        _expandable,
        _chunked,
        _reduced_every_time,
        _shared_out,
        _fully_sharded,
        _compressed,
        _recomputed_in_part,
        _recomputed,
        _single_sample,
        _activations_on_host,
        _states_on_host,
        _in_four_bits,
        _computed_in_bf16,
    ):
        for change in make(together.config):
            parts = [*_without(parts, change), change]
            words = tuple(word for part in parts for word in part.words)
            together = Change(words, "; ".join(part.cost for part in parts), change.config)
            if len(words) > 1:
                yield together
    if not more_ranks:
        return
    yield from _more_nodes(config)
    if together.words:
        yield from (
            Change(together.words + each.words, f"{together.cost}; {each.cost}", each.config)
            for each in _more_nodes(together.config)
        )


def _without(parts: Iterable[Change], later: Change) -> Iterator[Change]:
    """Yield `parts` without the keys that `later` sets."""
    for part in parts:
        words = tuple(word for word in part.words if word.split("=")[0] not in later.keys)
        if words:
            yield replace(part, words=words)


def _changed(config: Config, cost: str, values: Mapping[str, Any]) -> Change:
    """Return `config` with `values` by key, as the command line would set them; None: auto."""
    texts = {
        key: value if key in GROUPS else KEYS[key].text(value) for key, value in values.items()
    }
    words = tuple(f"{key}={text}" for key, text in texts.items())
    for key, value in values.items():
        section, _, name = key.partition(".")
        part = replace(getattr(config, section), **{name or "name": value})
        config = replace(config, **{section: part})
    given = config.strategy.under(config.strategy.name)
    return Change(words, cost, replace(config, strategy=resolved_strategy(config, given)))


def _expandable(config: Config) -> Iterator[Change]:
    if config.launch.allocator != "expandable":
        yield _changed(config, "nothing", {"launch.allocator": "expandable"})


def _chunked(config: Config) -> Iterator[Change]:
    samples = batches_of(config).micro_batch_size
    is_long = samples * config.train.seq_len >= 2 * _CHUNK
    if is_long and loss_chunk_tokens(config, samples) == 0:
        cost = "the logits are computed twice"
        yield _changed(config, cost, {"train.loss_chunk_tokens": _CHUNK})


def _reduced_every_time(config: Config) -> Iterator[Change]:
    passes = batches_of(config).num_micro_batches
    if config.accumulation.name == "last" and passes > 1:
        cost = f"gradients are reduced {passes} times per step instead of once"
        yield _changed(config, cost, {"accumulation": "every"})


def _shared_out(config: Config) -> Iterator[Change]:
    given = config.strategy
    row = sharded_over_copies(get_strategy(given.name))
    if row is None or config.engine.name != FSDPCTL or given.dp_shard_size == world_size(config):
        return
    cost = "replicas shard gradients and optimizer states, and exchange updated parameters"
    yield _changed(config, cost, {"strategy": row.name})


def _fully_sharded(config: Config) -> Iterator[Change]:
    if config.strategy.name == "full_shard" or config.optimizer.name == MUON:
        return
    values: dict[str, Any] = {"strategy": "full_shard"}
    if config.strategy.dp_shard_size is not None:
        values["strategy.dp_shard_size"] = None
    if config.engine.name == DDP:
        values["engine"] = FSDPCTL
    cost = "all ranks share one replica; each unit is gathered in forward and again in backward"
    yield _changed(config, cost, values)


def _recomputed_in_part(config: Config) -> Iterator[Change]:
    if config.activation_checkpointing.name == "none":
        cost = "every second matrix product is recomputed"
        yield _changed(config, cost, {"activation_checkpointing": "selective"})


def _recomputed(config: Config) -> Iterator[Change]:
    if config.activation_checkpointing.name != "full":
        cost = "a third more computation: the forward of blocks runs twice"
        yield _changed(config, cost, {"activation_checkpointing": "full"})


def _smaller_batch(config: Config) -> Iterator[Change]:
    size = batches_of(config).micro_batch_size // 2
    while size:
        yield _with_micro_batch(config, size)
        size //= 2


def _single_sample(config: Config) -> Iterator[Change]:
    if batches_of(config).micro_batch_size > 1:
        yield _with_micro_batch(config, 1)


def _with_micro_batch(config: Config, size: int) -> Change:
    found = _changed(config, "", {"train.micro_batch_size": size, **_steps_as_needed(config)})
    passes = [batches_of(each).num_micro_batches for each in (found.config, config)]
    return replace(found, cost=f"{passes[0]} smaller micro-batches per step instead of {passes[1]}")


def _steps_as_needed(config: Config) -> dict[str, None]:
    """Return the setting that resets the number of passes, if it was set."""
    return {} if config.accumulation.steps is None else {"accumulation.steps": None}


def _compressed(config: Config) -> Iterator[Change]:
    about = config.optimizer
    plain = about.name == "adamw" and about.state_dtype is None and config.model.lora.rank is None
    own = config.engine.name == FSDPCTL and about.offload == Offload.NONE
    if plain and own and config.precision.master_dtype == "float32":
        cost = "moments are rounded to 8 bits"
        yield _changed(config, cost, {"optimizer.state_dtype": "int8"})


def _states_on_host(config: Config) -> Iterator[Change]:
    about = config.optimizer
    plain = about.name == "adamw" and about.state_dtype in (None, "float32")
    if plain and about.offload == Offload.NONE and config.engine.name == FSDPCTL:
        cost = "{} on the host, and the optimizer's step"
        for value, what in (
            (Offload.STATES, "master weights and moments"),
            (Offload.ALL, "gradients, master weights and moments"),
        ):
            yield _changed(config, cost.format(what), {"optimizer.offload": value.value})


def _activations_on_host(config: Config) -> Iterator[Change]:
    about = config.activation_checkpointing
    if about.name != "none" and not about.offload and config.engine.name == FSDPCTL:
        cost = "inputs of recomputed blocks are on the host"
        yield _changed(config, cost, {"activation_checkpointing.offload": True})


def _in_four_bits(config: Config) -> Iterator[Change]:
    if config.model.lora.rank is not None and config.model.base_dtype is None:
        cost = "frozen weights are rounded to 4 bits, and dequantized in forward and backward"
        yield _changed(config, cost, {"model.base_dtype": "nf4"})


def _computed_in_bf16(config: Config) -> Iterator[Change]:
    if config.precision.param_dtype == "float32":
        yield _changed(config, "compute in bfloat16", {"precision.param_dtype": "bfloat16"})


def _more_nodes(config: Config) -> Iterator[Change]:
    nodes = 2 * config.launch.nnodes
    while nodes <= _MOST_NODES:
        found = _changed(config, "", {"launch.nnodes": nodes, **_steps_as_needed(config)})
        yield replace(found, cost=f"{world_size(found.config)} ranks")
        nodes *= 2


# Of single changes, what costs least first.
_MAKERS: tuple[Callable[[Config], Iterator[Change]], ...] = (
    _expandable,
    _chunked,
    _reduced_every_time,
    _shared_out,
    _compressed,
    _fully_sharded,
    _recomputed_in_part,
    _smaller_batch,
    _recomputed,
    _activations_on_host,
    _states_on_host,
    _in_four_bits,
)
