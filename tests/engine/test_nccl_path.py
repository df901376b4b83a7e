"""The collectives of NCCL, run over gloo: their arguments and results."""

from itertools import pairwise

import pytest
import torch

from fsdpctl.engine.parameters import ParameterSnapshot
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.events import recording
from tests.engine.models import WIDE, make_net, next_token_loss, one_step, token_batches
from tests.engine.nccl import Stream, nccl_path
from tests.engine.test_parity import largest_difference
from tests.engine.test_trace import planned_events, recorded_events
from tests.matrix import WHOLE, cases
from tests.reference import train_reference

STRATEGY_NAMES = list(STRATEGIES)


def _half(strategy: str) -> int | None:
    return 2 if STRATEGIES[strategy].replicates else None


@pytest.mark.slow
@WHOLE
@distributed(world_size=4)
def test_events_bytes_and_buffers_equal_the_plan(rank: int, world_size: int, whole: bool) -> None:
    with nccl_path():
        names = STRATEGY_NAMES if whole else ["full_shard", "hybrid_shard"]
        for strategy, tied in cases(names, [False, True], whole=whole):
            net, precision = make_net(tied=tied), Precision(torch.bfloat16)
            model = shard_model(net, strategy, precision=precision, dp_shard_size=_half(strategy))
            assert recorded_events(model, rank) == planned_events(model), (strategy, tied)


@distributed(world_size=4)
def test_the_sum_over_replicas_follows_a_reduction_at_once(rank: int, world_size: int) -> None:
    """The sum starts before the next unit's backward, without waiting for the reduction."""
    tokens = token_batches(1, world_size)[0][rank][0]
    with nccl_path():
        model = shard_model(make_net(tied=False), "hybrid_shard", dp_shard_size=2)
        with recording(model) as events:
            next_token_loss(model, tokens).backward()
    of_units = [each for each in events if each.buffer is None]
    for event, following in pairwise(of_units):
        if event.kind == "reduce":
            assert (following.kind, following.unit) in (
                ("combine", event.unit),
                ("combined", following.unit),  # to make room
            )
    begun = [(str(each.kind), each.unit) for each in of_units]
    for unit in ("blocks.0", "blocks.3"):
        assert begun.index(("combine", unit)) < begun.index(("reduced", unit))


@pytest.mark.slow
@WHOLE
@distributed(world_size=4)
def test_units_larger_than_a_block_are_reduced_in_pieces(rank, world_size, whole):
    """Results equal one process and the plan; no buffer exceeds a block's gradients."""
    names = [name for name, row in STRATEGIES.items() if row.shards_params]
    names = names if whole else ["full_shard"]
    batches = token_batches(3, world_size)
    with nccl_path():
        for strategy, tied in cases(names, [False, True], whole=whole):
            expected = train_reference(make_net(tied=tied, vocab=WIDE), next_token_loss, batches)
            net = make_net(tied=tied, vocab=WIDE)
            model = shard_model(net, strategy, dp_shard_size=_half(strategy))
            optimizer = ShardedAdamW(model, lr=1e-2)
            for of_ranks in batches:
                one_step(model, optimizer, of_ranks[rank][0])
            assert largest_difference(model.state_dict(), expected) <= 1e-6, (strategy, tied)
            recorded = recorded_events(model, rank)
            assert recorded == planned_events(model), (strategy, tied)
            sent = [event for event in recorded[0] if event.kind == "reduce"]
            largest = max(event.nbytes for event in sent if event.unit.startswith("blocks"))
            pieces = [event for event in sent if event.unit == ("root" if tied else "embed")]
            assert len(pieces) > 8
            assert all(event.nbytes <= largest for event in pieces)


def test_another_stream_than_that_of_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream(), Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    parameters = ParameterSnapshot([], torch.device("cuda", 0))
    parameters.check()
    streams.reverse()
    with pytest.raises(EngineError, match="another CUDA stream"):
        parameters.check()
