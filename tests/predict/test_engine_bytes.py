"""The estimated bytes equal the bytes that the engine has allocated."""

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.estimate.planned_steps import plan_training
from fsdpctl.models.build_model import build_model
from fsdpctl.models.module_spec import module_units
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.step_plan import MeshPosition, StepPlan, Transport
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.plan.units import lay_out
from fsdpctl.predict.engine_bytes import EnginePeak, engine_peak, timeline
from fsdpctl.predict.step_recorder import Category
from fsdpctl.predict.training_plan import TrainingPlan
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.distributed import distributed, in_turn
from tests.engine.models import make_net, next_token_loss, run_window, token_batches
from tests.matrix import WHOLE, cases, fast

SHARDINGS = [(name, "even") for name in STRATEGIES] + [
    ("shard_optimizer", name) for name in ("round_robin", "contiguous", "balanced")
]
HYBRIDS = [name for name, row in STRATEGIES.items() if row.replicates]
WINDOWS = [(True,), (True, True, True), (False, False, True)]


def planned(
    strategy: str, owner_map: str, ranks: int, reduces: tuple[bool, ...], *, tied: bool, bf16: bool,
    replicas: int = 1,
) -> EnginePeak:  # fmt: skip
    units = module_units(make_net(tied=tied), None)
    model_layout = lay_out(units, STRATEGIES[strategy], ranks, ranks // replicas, owner_map)
    position = MeshPosition(0, model_layout.ranks_per_replica, replicas, Transport.GLOO)
    step_plan = StepPlan(model_layout, position, Precision("bfloat16" if bf16 else None))
    return engine_peak(TrainingPlan(step_plan, reduces))


def measured(model: ShardedModel, rank: int, reduces: tuple[bool, ...]) -> int:
    """Return the peak of this rank in the second step, which has optimizer states."""
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in token_batches(2, model.collectives.size, micro_steps=len(reduces)):
        model.accounting.peak_nbytes = model.accounting.nbytes
        run_window(model, of_ranks[rank], reduces)
        optimizer.step()
        optimizer.zero_grad()
    return model.peak_memory_bytes() + optimizer.memory_bytes()


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize("world_size", fast(3, slow=[1, 2, 4]))
@distributed()
def test_the_estimate_equals_the_bytes_of_the_fullest_rank(rank, world_size, whole):
    both = [False, True]
    for ranks, reduces, tied, bf16, (strategy, owner_map) in cases(
        [1, 2, 3, 4], WINDOWS, both, both, SHARDINGS, whole=whole
    ):
        if ranks != world_size:
            continue
        owner_map = owner_map if world_size > 1 else "even"
        precision = Precision(param_dtype=torch.bfloat16 if bf16 else None)
        model = shard_model(make_net(tied=tied), strategy, owner_map=owner_map, precision=precision)
        held = model.collectives.all_gather_values(measured(model, rank, reduces))
        expected = planned(strategy, owner_map, world_size, reduces, tied=tied, bf16=bf16)
        assert max(held) == held[expected.rank] == expected.peak_bytes


@pytest.mark.slow
@WHOLE
@distributed(world_size=4)
def test_the_estimate_is_exact_with_replicas(rank: int, world_size: int, whole: bool) -> None:
    both = [False, True]
    for reduces, tied, bf16, strategy in cases(WINDOWS, both, both, HYBRIDS, whole=whole):
        precision = Precision(param_dtype=torch.bfloat16 if bf16 else None)
        model = shard_model(make_net(tied=tied), strategy, dp_shard_size=2, precision=precision)
        held = model.collectives.all_gather_values(measured(model, rank, reduces))
        expected = planned(strategy, "even", 4, reduces, tied=tied, bf16=bf16, replicas=2)
        assert max(held) == held[expected.replica * 2 + expected.rank] == expected.peak_bytes


@pytest.mark.slow
@distributed(world_size=4)
@in_turn(strategy=list(STRATEGIES))
def test_gradients_and_states_are_sharded_as_in_the_table(rank, world_size, strategy):
    """Measure storages: a rank has a shard or all of the gradients, and two moments of each."""
    row = STRATEGIES[strategy]
    parts = 2 if row.replicates else 4
    size = parts * row.shares_per_shard(2)
    model = shard_model(make_net(tied=True), strategy, dp_shard_size=2 if row.replicates else None)
    optimizer = ShardedAdamW(model, lr=1e-2)
    next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    whole = sum(shard.layout.numel for shard in model.flat_shards())
    grads = [shard.grad for shard in model.flat_shards() if shard.grad is not None]
    of_grads = [grad.untyped_storage().nbytes() for grad in grads]
    assert sum(of_grads) == 4 * whole // (size if row.shards_grads else 1)
    optimizer.step()
    states = optimizer.memory_bytes() - 4 * len(optimizer.spans)
    expected = 2 * 4 * whole // (size if row.shards_optimizer else 1)
    assert expected - 2 * 4 * 64 * len(of_grads) <= states <= expected  # no states for padding
    masters = {s.master.untyped_storage().data_ptr(): s.master for s in model.flat_shards()}
    taken = sum(master.untyped_storage().nbytes() for master in masters.values())
    if row.shards_params:
        assert taken == 4 * whole // parts  # masters in the same dtype are views


ARGS = ["model.vocab_size=1000", "launch.device=cpu", "launch.share_memory=false"]


def of_config(*args: str) -> EnginePeak:
    """Return the engine's memory on the fullest rank."""
    plan = make_run_plan(prepare(compose_config([*ARGS, *args]), ESTIMATE_ROLE).config)
    units = module_units(build_model(plan.config.model), None)
    return engine_peak(plan_training(plan.config, units, plan.batches.num_micro_batches))


def test_every_strategy_shards_as_specified():
    ranks = "launch.nproc_per_node=4"
    grads, states = Category.GRADIENTS, Category.OPTIMIZER_STATES
    whole = of_config("strategy=no_shard", ranks).largest
    for name, row in STRATEGIES.items():
        largest = of_config(f"strategy={name}", ranks).largest
        assert (largest[grads] * 4 == whole[grads]) == row.shards_grads
        share = largest[states] / whole[states]
        assert share == pytest.approx(0.25 if row.shards_optimizer else 1.0, rel=0.01)


def test_owner_maps_count_for_the_strategy_that_has_one():
    args = ["strategy=shard_optimizer", "launch.nproc_per_node=4"]
    uneven = of_config(*args, "strategy.owner_map=round_robin").breakdown
    states = Category.OPTIMIZER_STATES
    assert uneven[states] > of_config(*args).breakdown[states]


def test_uneven_maps_are_searched_for_the_fullest_of_many_ranks():
    args = ["model.num_layers=7", "model.hidden_size=32", "model.intermediate_size=48"]
    args += ["strategy=shard_optimizer", "strategy.owner_map=balanced", "accumulation=last"]
    args += ["launch.nproc_per_node=100", "train.global_batch_size=400", "accumulation.steps=4"]
    config = make_run_plan(prepare(compose_config([*ARGS, *args]), ESTIMATE_ROLE).config).config
    plan = plan_training(config, module_units(build_model(config.model), None), 4)
    peaks = [max(sum(h.values()) for h in timeline(plan.at(rank))) for rank in range(100)]
    assert of_config(*args).peak_bytes == max(peaks)
