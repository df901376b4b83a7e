"""The training plan of a configuration, and its steps with each engine."""

from dataclasses import dataclass, replace

from fsdpctl.config.schema import Resolved
from fsdpctl.plan.optimizers import ADAMW, MuonSettings, OptimizerStates, get_optimizer, tiled_dtype
from fsdpctl.plan.step_plan import MeshPosition, StepPlan, Transport
from fsdpctl.plan.strategy import DDP, FSDPCTL, Offload, Strategy, check_strategy, get_strategy
from fsdpctl.plan.units import ModelLayout, UnitSpec, lay_out
from fsdpctl.predict.engine_bytes import engine_peak, fullest_ranks
from fsdpctl.predict.fsdpctl_steps import FsdpctlSteps
from fsdpctl.predict.step_recorder import RankGroup, StepRecorder, Steps, TrafficRecorder
from fsdpctl.predict.torch_steps import DdpSteps, Fsdp2Steps
from fsdpctl.predict.training_plan import TrainingPlan
from fsdpctl.resolve.machine import owner_map_of, shares_memory

MOST_PLANNED_PASSES = 3  # per step; additional passes need no more memory
_MAX_REPLAYED_RANKS = 16  # with more ranks, only the rank that owns most is replayed


def reducing_passes(count: int, *, every: bool) -> tuple[bool, ...]:
    """Return for each pass of a step whether it reduces gradients: every pass, or only the last."""
    return (*[every] * (count - 1), True)


def optimizer_states(config: Resolved) -> OptimizerStates:
    """Return the optimizer states of a configuration."""
    optimizer, row = config.optimizer, get_optimizer(config.optimizer.name)
    has_moments = optimizer.momentum > 0 or not row.needs_momentum
    muon = MuonSettings(optimizer.ns_steps, optimizer.nesterov) if row.steps_matrices else None
    masters = [str(config.precision.master_dtype)]
    # None: AdamW doesn't step in tiles, so moments have the dtype of the masters.
    dtype = None if muon else tiled_dtype(optimizer.state_dtype, masters)
    return OptimizerStates(row.moments * has_moments, row.counter, muon, dtype)


def first_position(
    model_layout: ModelLayout, num_ranks: int, device: str, *, shares_memory: bool = False
) -> MeshPosition:
    """Return the position of rank 0."""
    size, transport = model_layout.ranks_per_replica, Transport.GLOO
    if device == "cuda":
        transport = Transport.NCCL
    elif shares_memory:
        transport = Transport.SHARED
    return MeshPosition(0, size, num_replicas=num_ranks // size, transport=transport)


def plan_training(config: Resolved, units: tuple[UnitSpec, ...], num_passes: int) -> TrainingPlan:
    """Return the plan of rank 0; a step has at most MOST_PLANNED_PASSES passes."""
    strategy, ranks = config.strategy, config.num_ranks
    device, shares = str(config.launch.device), shares_memory(config)
    size, offloads = strategy.dp_shard_size or ranks, Offload.PARAMS in strategy.offloaded
    requested, owners = get_strategy(strategy.name), owner_map_of(config)
    model_layout = lay_out(
        units, requested, ranks, size, owners, shares_memory=shares, offloads_params=offloads
    )
    position = first_position(model_layout, ranks, device, shares_memory=shares)
    precision, prefetch = config.precision.planned, config.prefetch.planned
    step_plan = StepPlan(model_layout, position, precision, prefetch, strategy.offloaded)
    passes, every = min(num_passes, MOST_PLANNED_PASSES), config.accumulation.name == "every"
    return TrainingPlan(step_plan, reducing_passes(passes, every=every), optimizer_states(config))


def engine_steps(
    engine: str,
    strategy: Strategy,
    units: tuple[UnitSpec, ...],
    plan: TrainingPlan,
    recorder: StepRecorder,
    *,
    fused: bool = True,
    regathers: bool = False,
) -> Steps:
    """Return the steps of a rank under `engine`, recorded in `recorder`.

    `strategy` is the requested strategy. The strategy of `plan` may differ if there is one rank. If
    `regathers`, backward gathers a unit again after its recomputation. UsageError if the engine
    does not support the strategy.
    """
    check_strategy(engine, strategy)
    if engine == DDP:
        return DdpSteps(units, plan, recorder, fused=fused)
    if engine == FSDPCTL:
        return FsdpctlSteps(plan, recorder)
    return Fsdp2Steps(units, strategy, plan, recorder, fused=fused, regathers=regathers)


def planned_steps(
    config: Resolved, units: tuple[UnitSpec, ...], plan: TrainingPlan, recorder: StepRecorder
) -> Steps:
    """Return the steps of a rank for a resolved configuration, as `engine_steps`."""
    strategy, engine = get_strategy(config.strategy.name), config.engine
    fused = engine.emulated.fused_optimizer or config.optimizer.name != ADAMW
    recomputes_all = config.activation_checkpointing.name == "full"
    regathers = engine.emulated.reentrant_checkpoints and recomputes_all
    return engine_steps(
        engine.name, strategy, units, plan, recorder, fused=fused, regathers=regathers
    )


def plan_of_fullest_rank(engine: str, plan: TrainingPlan) -> TrainingPlan:
    """Return the plan of the rank that needs the most memory.

    Under uneven owner maps of more than 16 ranks, this is the rank that owns most elements.
    """
    layouts = list(plan.step_plan.all_layouts())
    is_even = all(layout.is_even for layout in layouts)
    if engine != FSDPCTL or (is_even and plan.states.dtype is None):
        return plan
    if is_even:  # ranks differ only by compressed states
        return fullest_ranks(plan)[0]
    if plan.step_plan.position.num_shards <= _MAX_REPLAYED_RANKS:
        return plan.at(engine_peak(plan).rank)
    by_rank = zip(*(layout.shard_spans for layout in layouts), strict=True)
    owned = [sum(span.numel for span in spans) for spans in by_rank]
    return plan.at(owned.index(max(owned)))


@dataclass(frozen=True, slots=True)
class SentBytes:
    """The bytes of parameters and gradients that a rank sends in a step."""

    intra_replica: float  # to ranks of the same replica
    inter_replica: float  # to the ranks with the same shard of other replicas

    @property
    def total(self) -> int:
        return round(self.intra_replica + self.inter_replica)


def sent_per_step(config: Resolved, units: tuple[UnitSpec, ...], num_passes: int) -> SentBytes:
    """Return what a rank sends for a resolved configuration, whose model has these units."""
    reduces = reducing_passes(num_passes, every=config.accumulation.name == "every")
    # All passes: those beyond MOST_PLANNED_PASSES send too.
    plan = replace(plan_training(config, units, num_passes), reduces_gradients=reduces)
    recorder, position = TrafficRecorder(), plan.step_plan.position
    planned_steps(config, units, plan, recorder).step()
    return SentBytes(
        recorder.sent_bytes(RankGroup.SHARD, position.num_shards),
        recorder.sent_bytes(RankGroup.REPLICAS, position.num_replicas),
    )
