"""The plan of a run: the values of settings that depend on the number of ranks."""

from dataclasses import dataclass, replace

from fsdpctl.config.launch import LaunchConfig
from fsdpctl.config.schema import Config, Filled, Origin, Resolved, WithRanks
from fsdpctl.config.selection import MICRO_BATCH, Selection, with_selection
from fsdpctl.plan.batch_plan import BatchPlan, plan_batches
from fsdpctl.resolve.auto_values import AutoInputs, Stage, check_chunks, fill_auto
from fsdpctl.resolve.rules import validate


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The resolved settings of a run, as in config.yaml, and the samples of each rank."""

    requested: Filled  # requested settings plus the selection; suggestions start from it
    config: Resolved
    batches: BatchPlan


def make_run_plan(
    config: Filled, selection: Selection | None = None, launch: LaunchConfig | None = None
) -> RunPlan:
    """Return the plan of a configuration, without opening data or model.

    A micro-batch that was selected for fewer ranks is limited to a rank's share of the step.
    `launch` replaces the ranks that `config` was prepared for. UsageError if the ranks cannot run
    the configuration; the message names the keys.
    """
    config = config if launch is None else replace(config, launch=launch)
    if selection is not None:
        config = with_selection(config, selection)
    requested, config = config, validate(config)
    if config.origin(MICRO_BATCH) is Origin.SELECTED:
        share = config.samples_per_group
        size = min(config.train.micro_batch_size or share, share)
        config = config.changed({MICRO_BATCH: size})
    batches = _batches(config)
    check_chunks(config, batches)
    config = fill_auto(config, Stage.BATCHES, AutoInputs(batches=batches))
    return RunPlan(requested, Resolved(config), batches)


def stored_config(config: Config) -> Resolved:
    """Return a configuration from a run directory or a checkpoint, which is resolved already."""
    return Resolved(Filled(WithRanks(config)))


def stored_plan(config: Config) -> RunPlan:
    """Return the plan of a stored configuration."""
    return RunPlan(stored_config(config), stored_config(config), _batches(config))


def _batches(config: Config) -> BatchPlan:
    return plan_batches(
        config.train.global_batch_size,
        config.num_ranks,
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
        context_parallel=config.train.context_parallel,
    )
