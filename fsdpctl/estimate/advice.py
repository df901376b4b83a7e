"""Changes with which a run fits, and their cost."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fsdpctl.config.schema import ActivationCheckpointingConfig, Config, StrategyConfig
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator, batches_of
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.plan.strategy import get_strategy, sharded_over_copies
from fsdpctl.resolve.loss_chunks import loss_chunk_tokens
from fsdpctl.resolve.machine import resolved_strategy, world_size

_CHANGES = 3
_MOST_NODES = 1 << 10
_CHUNK = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Change:
    """Changed settings, and their cost."""

    words: tuple[str, ...]  # the settings
    cost: str
    config: Config  # with it


def advice(
    estimator: Estimator, config: Config, *, more_ranks: bool = True
) -> list[tuple[Change, RunEstimate]]:
    """Return up to three changes that make a resolved configuration fit, cheapest first.

    They cost nothing, a little time, communication, computation, or (with `more_ranks`) more ranks,
    in this order.
    """
    found: list[tuple[Change, RunEstimate]] = []
    for change in _changes(config, more_ranks=more_ranks):
        if any(set(cheaper.words) <= set(change.words) for cheaper, _ in found):
            continue  # it includes a change that suffices
        try:
            estimate = estimator.estimate(change.config)
        except UsageError:
            continue
        if estimate.verdict == "fits":
            found.append((change, estimate))
            if len(found) == _CHANGES or _adds_ranks(change):
                break
    return found


def _adds_ranks(change: Change) -> bool:
    return any(word.startswith("launch.nnodes=") for word in change.words)


def _changes(config: Config, *, more_ranks: bool) -> Iterator[Change]:
    """Yield single changes, cheapest first, then more and more of them, then more nodes."""
    for make in (
        _expandable,
        _chunked,
        _reduced_every_time,
        _shared_out,
        _fully_sharded,
        _recomputed_in_part,
        _smaller_batch,
        _recomputed,
        _computed_in_bf16,
    ):
        yield from make(config)
    parts: list[Change] = []
    together = Change((), "", config)
    for make in (
        _expandable,
        _chunked,
        _reduced_every_time,
        _shared_out,
        _fully_sharded,
        _recomputed_in_part,
        _recomputed,
        _single_sample,
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
        words = tuple(word for word in part.words if not _same_key(word, later.words))
        if words:
            yield Change(words, part.cost, part.config)


def _same_key(word: str, words: tuple[str, ...]) -> bool:
    return word.split("=")[0] in {each.split("=")[0] for each in words}


def _expandable(config: Config) -> Iterator[Change]:
    if config.launch.allocator != "expandable":
        launch = replace(config.launch, allocator="expandable")
        yield Change(("launch.allocator=expandable",), "nothing", replace(config, launch=launch))


def _chunked(config: Config) -> Iterator[Change]:
    samples = batches_of(config).micro_batch_size
    is_long = samples * config.train.seq_len >= 2 * _CHUNK
    if is_long and loss_chunk_tokens(config, samples) == 0:
        train = replace(config.train, loss_chunk_tokens=_CHUNK)
        words = (f"train.loss_chunk_tokens={_CHUNK}",)
        yield Change(words, "the logits are computed twice", replace(config, train=train))


def _reduced_every_time(config: Config) -> Iterator[Change]:
    passes = batches_of(config).num_micro_batches
    if config.accumulation.name == "last" and passes > 1:
        accumulation = replace(config.accumulation, name="every")
        cost = f"gradients are reduced {passes} times per step instead of once"
        yield Change(("accumulation=every",), cost, replace(config, accumulation=accumulation))


def _shared_out(config: Config) -> Iterator[Change]:
    given = config.strategy
    row = sharded_over_copies(get_strategy(given.name))
    if row is None or config.engine.name != "fsdpctl" or given.dp_shard_size == world_size(config):
        return
    changed = resolved_strategy(config, replace(given, name=row.name))
    cost = "replicas shard gradients and optimizer states, and exchange updated parameters"
    yield Change((f"strategy={row.name}",), cost, replace(config, strategy=changed))


def _fully_sharded(config: Config) -> Iterator[Change]:
    if config.strategy.name == "full_shard":
        return
    words: tuple[str, ...] = ("strategy=full_shard",)
    if config.strategy.dp_shard_size is not None:
        words += ("strategy.dp_shard_size=auto",)
    changed = replace(config, strategy=resolved_strategy(config, StrategyConfig("full_shard")))
    if config.engine.name == "ddp":
        words += ("engine=fsdpctl",)
        changed = replace(changed, engine=replace(config.engine, name="fsdpctl"))
    cost = "all ranks share one replica; each unit is gathered in forward and again in backward"
    yield Change(words, cost, changed)


def _recomputed_in_part(config: Config) -> Iterator[Change]:
    if config.activation_checkpointing.name == "none":
        yield _checkpointed(config, "selective", "every second matrix product is recomputed")


def _recomputed(config: Config) -> Iterator[Change]:
    if config.activation_checkpointing.name != "full":
        yield _checkpointed(
            config, "full", "a third more computation: the forward of blocks runs twice"
        )


def _checkpointed(config: Config, mode: str, cost: str) -> Change:
    selected = ActivationCheckpointingConfig(mode)
    changed = replace(config, activation_checkpointing=selected)
    return Change((f"activation_checkpointing={mode}",), cost, changed)


def _smaller_batch(config: Config) -> Iterator[Change]:
    size = batches_of(config).micro_batch_size // 2
    while size:
        yield _with_micro_batch(config, size)
        size //= 2


def _single_sample(config: Config) -> Iterator[Change]:
    if batches_of(config).micro_batch_size > 1:
        yield _with_micro_batch(config, 1)


def _with_micro_batch(config: Config, size: int) -> Change:
    changed = replace(
        config,
        train=replace(config.train, micro_batch_size=size),
        accumulation=replace(config.accumulation, steps=None),
    )
    before, after = batches_of(config).num_micro_batches, batches_of(changed).num_micro_batches
    cost = f"{after} smaller micro-batches per step instead of {before}"
    return Change((f"train.micro_batch_size={size}", *_steps_as_needed(config)), cost, changed)


def _steps_as_needed(config: Config) -> tuple[str, ...]:
    """Return the setting that resets the number of passes, if it was set."""
    return () if config.accumulation.steps is None else ("accumulation.steps=auto",)


def _computed_in_bf16(config: Config) -> Iterator[Change]:
    if config.precision.param_dtype == "float32":
        precision = replace(config.precision, param_dtype="bfloat16")
        words, cost = ("precision.param_dtype=bfloat16",), "compute in bfloat16"
        yield Change(words, cost, replace(config, precision=precision))


def _more_nodes(config: Config) -> Iterator[Change]:
    nodes = 2 * config.launch.nnodes
    while nodes <= _MOST_NODES:
        more = replace(
            config,
            launch=replace(config.launch, nnodes=nodes),
            accumulation=replace(config.accumulation, steps=None),
        )
        cost = f"{world_size(more)} ranks"
        given = resolved_strategy(more, config.strategy)
        words = (f"launch.nnodes={nodes}", *_steps_as_needed(config))
        yield Change(words, cost, replace(more, strategy=given))
        nodes *= 2
