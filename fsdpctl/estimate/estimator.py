"""Estimates the memory of a configuration: it is traced, planned and replayed."""

from collections import OrderedDict
from dataclasses import replace

from fsdpctl.config.schema import Config
from fsdpctl.data.open import open_data
from fsdpctl.errors import UsageError
from fsdpctl.estimate.engines import fullest_rank, steps_of
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.run_plan import plan_run
from fsdpctl.estimate.traced import TracedModel
from fsdpctl.plan.batch import BatchPlan, plan_batches
from fsdpctl.plan.engines import OURS, has_strategy
from fsdpctl.plan.strategy import STRATEGIES, get_strategy
from fsdpctl.predict.memory_recorder import MemoryRecorder
from fsdpctl.predict.step_estimate import estimate_steps
from fsdpctl.resolve.attention import assumed_of, check_attention
from fsdpctl.resolve.loss_chunks import loss_chunk_tokens
from fsdpctl.resolve.machine import (
    check_length,
    placed_on_cluster,
    resolved_strategy,
    with_batch_size,
    world_size,
)

_MOST_TRACED = 64  # models that are kept
_traced: OrderedDict[tuple[object, ...], TracedModel] = OrderedDict()


class Estimator:
    """Estimates configurations; each model is traced once per process."""

    def estimate(self, config: Config) -> RunEstimate:
        """Estimate a resolved configuration.

        Raises:
            UsageError: If it is not valid.
        """
        traced = self.traced_model(config)
        if config.engine.name != OURS and traced.num_trained < traced.num_params:
            raise UsageError(
                f"engine={config.engine.name}: model.lora and model.trainable are not supported in "
                "estimates"
            )
        batches = batches_of(config)
        micro = batches.micro_batch_size
        chunk = loss_chunk_tokens(config, micro)
        program = traced.program(micro, config.train.seq_len, chunk)
        last = traced.units[-1]
        recorder = MemoryRecorder(program, last.name, last_is_head=last.kind == "head")
        plan, place = plan_run(config, traced.units, batches.num_micro_batches)
        place = replace(place, rank=fullest_rank(config.engine.name, plan, place))
        strategy = get_strategy(config.strategy.name)
        steps = steps_of(config.engine.name, strategy, traced.units, plan, place, recorder)
        step = estimate_steps(
            recorder,
            steps,
            device=str(config.launch.device),
            allocator=config.launch.allocator,
            draws=config.engine.name == OURS and not config.model.is_pretrained,
        )
        counts = (traced.num_params, traced.num_trained, traced.num_active)
        return RunEstimate(config, batches, *counts, place.rank, step)

    def traced_model(self, config: Config) -> TracedModel:
        """Return the traced model of a resolved configuration."""
        alike = (
            config.model,
            config.precision.param_dtype,
            config.activation_checkpointing.name,
            config.launch.device,
            config.data.holds_documents,
            assumed_of(config),
        )
        if alike not in _traced:
            _traced[alike] = TracedModel(config)
            if len(_traced) > _MOST_TRACED:
                _traced.popitem(last=False)
        return _traced[alike]


def batches_of(config: Config) -> BatchPlan:
    """Return the batches of a step, with at least one sample per rank."""
    train, ranks = config.train, world_size(config)
    return plan_batches(
        max(train.global_batch_size, ranks),
        ranks,
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
    )


def estimate_strategies(estimator: Estimator, config: Config, *, every: bool) -> list[RunEstimate]:
    """Estimate the strategy of `config`, or with `every` all that its engine supports.

    Settings that are not valid with a strategy are dropped.

    Raises:
        UsageError: If the configuration is not valid.
    """
    placed = placed_for_estimate(config)
    given = map(config.strategy.under, STRATEGIES) if every else [config.strategy]
    return [
        estimator.estimate(replace(placed, strategy=resolved_strategy(placed, each)))
        for each in given
        if not every or has_strategy(config.engine.name, STRATEGIES[each.name])
    ]


def placed_for_estimate(config: Config) -> Config:
    """Return `config` on its cluster, with the vocabulary of its data if it sets none.

    Raises:
        UsageError: If the configuration is not valid.
    """
    check_length(config)
    placed = with_batch_size(placed_on_cluster(config))
    check_attention(placed)
    if config.model.vocab_size is not None:
        return placed
    vocab_size = open_data(config.data, config.train.seed).vocab_size
    return replace(placed, model=replace(placed.model, vocab_size=vocab_size))
