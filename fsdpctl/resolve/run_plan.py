"""From settings to a plan: the only place where what depends on the ranks is decided."""

from dataclasses import dataclass, replace

from fsdpctl.config.launch import LaunchConfig
from fsdpctl.config.schema import Config, Filled, Origin, Resolved, WithRanks
from fsdpctl.config.selection import MICRO_BATCH, Selection, with_selection
from fsdpctl.plan.batch_plan import BatchPlan, plan_batches
from fsdpctl.resolve.auto_values import AutoInputs, Stage, check_chunks, with_auto_values
from fsdpctl.resolve.rules import validate


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The settings of a run without `auto`, as config.yaml has them, and how they divide a step."""

    requested: Filled  # with what was selected: a change of a setting begins with it
    config: Resolved
    batches: BatchPlan


def make_run_plan(
    config: Filled, selection: Selection | None = None, launch: LaunchConfig | None = None
) -> RunPlan:
    """Return the plan of a placed configuration; opens neither data nor model.

    A selected micro-batch may come from other ranks: it is limited to a rank's share of the step.
    `launch` has the ranks if they differ from those that `config` was prepared for. UsageError if
    the ranks cannot run it; the message names the keys.
    """
    config = config if launch is None else replace(config, launch=launch)
    if selection is not None:
        config = with_selection(config, selection)
    requested, config = config, validate(config)
    if config.origin(MICRO_BATCH) is Origin.SELECTED:
        share = -(-config.train.global_batch_size // config.num_groups)
        size = min(config.train.micro_batch_size or share, share)
        config = config.changed({MICRO_BATCH: size})
    batches = _batches(config)
    check_chunks(config, batches)
    config = with_auto_values(config, Stage.BATCHES, AutoInputs(batches=batches))
    return RunPlan(requested, Resolved(config), batches)


def stored_config(config: Config) -> Resolved:
    """Return a configuration that a run has kept, in its directory or a checkpoint, as settled."""
    return Resolved(Filled(WithRanks(config)))


def stored_plan(kept: Config) -> RunPlan:
    return RunPlan(stored_config(kept), stored_config(kept), _batches(kept))


def _batches(config: Config) -> BatchPlan:
    return plan_batches(
        config.train.global_batch_size,
        config.num_ranks,
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
        context_parallel=config.train.context_parallel,
    )
