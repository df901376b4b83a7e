"""From settings to a plan: the only place where what depends on the ranks is decided."""

from dataclasses import dataclass, replace

from fsdpctl.config.auto import MICRO_BATCH, Selection, filled, left_open
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.config.schema import Config
from fsdpctl.plan.batch import BatchPlan, plan_batches
from fsdpctl.resolve.chunks import loss_chunk_tokens, mlp_chunk_tokens
from fsdpctl.resolve.decoder_check import check_shared_rows
from fsdpctl.resolve.rules import checked


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The settings of a run without `auto`, as config.yaml has them, and how they divide a step."""

    asked: Config  # with what was selected: a change of a setting begins with it
    config: Config
    batches: BatchPlan


def settle(
    config: Config, selection: Selection | None = None, launch: LaunchConfig | None = None
) -> RunPlan:
    """Return the plan of a placed configuration; opens neither data nor model.

    The micro-batch of `selection` may come from other ranks: it is limited to a rank's share of the
    step. `launch` has the ranks if they differ from those that `config` was opened with.

    Raises:
        UsageError: If the ranks cannot run it; the message names the keys.
    """
    config = config if launch is None else replace(config, launch=launch)
    names = left_open(config)
    if selection is not None:
        config = filled(config, selection)
    asked, config = config, checked(config)
    check_shared_rows(config)
    if selection is not None and MICRO_BATCH in names:
        share = -(-config.train.global_batch_size // config.num_groups)
        size = min(config.train.micro_batch_size or share, share)
        config = replace(config, train=replace(config.train, micro_batch_size=size))
    batches = plan_batches(
        config.train.global_batch_size,
        config.num_ranks,
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
        context_parallel=config.train.context_parallel,
    )
    size = batches.micro_batch_size
    train = replace(
        config.train,
        micro_batch_size=size,
        loss_chunk_tokens=loss_chunk_tokens(config, size),
        mlp_chunk_tokens=mlp_chunk_tokens(config, size),
    )
    accumulation = replace(config.accumulation, steps=batches.num_micro_batches)
    return RunPlan(asked, replace(config, train=train, accumulation=accumulation), batches)
