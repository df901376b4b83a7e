"""The engine does what the plan says: the recorded events equal the planned ones."""

import pytest
import torch

from fsdpctl.engine.runtime import reductions_in_flight
from fsdpctl.engine.shard import shard_model
from fsdpctl.plan.schedule import EventKind, Prefetch, most_whole_units, step_events
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.matrix import matrix


@matrix(strategy=list(STRATEGIES), tied=[False, True], prefetch=[(0, 0), (0, 1), (1, 1), (2, 1)])
@distributed(world_size=2)
def test_events_of_a_step_equal_the_plan(
    rank: int, world_size: int, strategy: str, prefetch: tuple[int, int], tied: bool
) -> None:
    depth = Prefetch(*prefetch)
    model = shard_model(make_net(tied=tied), strategy, prefetch=depth)
    batches = token_batches(1, world_size, micro_steps=2)[0][rank]
    with model.recorded_events() as trace:
        with model.no_sync():
            next_token_loss(model, batches[0]).backward()
        next_token_loss(model, batches[1]).backward()
    planned = step_events(
        model.unit_order,
        STRATEGIES[strategy],
        depth,
        reduces=(False, True),
        reductions_in_flight=reductions_in_flight({torch.float32: torch.float32}),
    )
    assert tuple(trace) == planned


@pytest.mark.parametrize("tied", [False, True])
@distributed(world_size=2)
def test_whole_parameters_alive_are_what_the_plan_says(
    rank: int, world_size: int, tied: bool
) -> None:
    """Bytes of the slots after every event: those of the plan's units, and never more than two
    blocks beside root, embedding and head."""
    model = shard_model(make_net(tied=tied), "full_shard")
    nbytes = model.unit_nbytes()
    blocks = [name for name in nbytes if name.startswith("blocks.")]
    block = max(nbytes[name] for name in blocks)
    two_blocks = 2 * block  # the resident slots, whether in use or not
    seen: list[tuple[int, frozenset[str]]] = []
    with model.recorded_events() as trace:
        model.watch(lambda: seen.append((model.gathered_nbytes(), most_whole_units(trace)[-1])))
        next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
    assert len(seen) == len(trace)
    oversize = {name for name in nbytes if name == "root" or not name.startswith("blocks.")}
    shared = {name for name in oversize if name != "root" and nbytes[name] <= 2 * block}
    for taken, alive in seen:
        assert len([name for name in alive if name in blocks]) <= 2
        alone = sum(nbytes[name] for name in alive if name in oversize - shared)
        assert taken == two_blocks + alone
    assert model.gathered_nbytes() == two_blocks


@distributed(world_size=2)
def test_releases_follow_gathers_when_nothing_is_trained(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=False), "full_shard")
    with model.recorded_events() as trace, torch.no_grad():
        model(token_batches(1, world_size)[0][rank][0])
    gathered = [event.unit for event in trace if event.kind is EventKind.GATHER]
    released = [event.unit for event in trace if event.kind is EventKind.RELEASE]
    assert sorted(gathered) == sorted(released)
