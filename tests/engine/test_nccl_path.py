"""What NCCL's collectives are told, and what is made of their results: here gloo answers them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpctl.comm.nccl import Received
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.parameters import ShardedParameters
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import shard_model
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.reductions import Transport
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.sizes import Itemsizes
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.events import recording
from tests.engine.models import OddNet, make_net, next_token_loss, token_batches
from tests.engine.nccl import Stream, nccl_path
from tests.engine.odd import KINDS
from tests.engine.test_parity import STEPS, largest_difference, train
from tests.engine.test_trace import planned_events, recorded_events
from tests.matrix import WHOLE, cases
from tests.reference import train_reference

STRATEGY_NAMES = list(STRATEGIES)
WIRES = [None, torch.bfloat16, torch.float32]


def _half(strategy: str) -> int | None:
    return 2 if STRATEGIES[strategy].replicates else None


def _trained(rank: int, world_size: int, strategy: str, wire: torch.dtype | None) -> ShardedModel:
    kind = KINDS["odd shapes"]
    precision = Precision(param_dtype=torch.bfloat16, wire_dtype=wire)
    half = _half(strategy)
    model = shard_model(kind.make(), strategy, precision=precision, dp_shard_size=half)
    train(model, rank, kind.batches(STEPS, world_size, 1), kind, "one")
    return model


@WHOLE
@distributed(world_size=4)
def test_bf16_on_the_wire_is_added_in_fp32_in_the_order_of_ranks(
    rank: int, world_size: int, whole: bool
) -> None:
    """So it is, bit for bit, what ranks that send each other their own gradients get."""
    strategies = [name for name, row in STRATEGIES.items() if row.shards_params]
    strategies = strategies if whole else ["hybrid_shard"]
    wires = WIRES if whole else [torch.bfloat16]
    for strategy, wire in cases(strategies, wires, whole=whole):
        expected = _trained(rank, world_size, strategy, None).state_dict()
        with nccl_path():
            found = _trained(rank, world_size, strategy, wire).state_dict()
        difference = largest_difference(found, expected)
        assert difference == 0.0 if wire is torch.bfloat16 else difference <= 1e-4


@pytest.mark.slow
@WHOLE
@distributed(world_size=4)
def test_events_bytes_and_buffers_equal_the_plan(rank: int, world_size: int, whole: bool) -> None:
    with nccl_path():
        names = STRATEGY_NAMES if whole else ["full_shard", "hybrid_shard"]
        for strategy, wire, tied in cases(names, WIRES, [False, True], whole=whole):
            sizes = Itemsizes(2, 4, 4, None if wire is None else wire.itemsize)
            net, precision = make_net(tied=tied), Precision(torch.bfloat16, wire_dtype=wire)
            model = shard_model(net, strategy, precision=precision, dp_shard_size=_half(strategy))
            planned = planned_events(
                model, net, Prefetch(), "even", sizes, transport=Transport.NCCL
            )
            assert recorded_events(model, rank) == planned, (strategy, wire, tied)


@distributed(world_size=4)
def test_the_sum_over_replicas_follows_a_reduction_at_once(rank: int, world_size: int) -> None:
    """Before the next unit's backward, and without waiting for the reduction."""
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


class _Operators(TorchDispatchMode):
    """Counts operators; on CUDA each launches a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_the_number_of_kernels_does_not_grow_with_the_ranks(out: torch.dtype) -> None:
    counts = set()
    for ranks in (2, 64):
        rows = torch.randn(ranks, 8).bfloat16()
        total = torch.empty(8, dtype=out)
        with _Operators() as operators:
            Received(rows, rows, lambda: None).finish(total, 0.5, torch.float32)
        counts.add(operators.count)
        torch.testing.assert_close(total, (rows.float().sum(0) * 0.5).to(out), rtol=1e-2, atol=1e-2)
    assert counts == {2}  # a sum and a scaling


WIDE = 401  # words: the embedding has 30 times what a block has


def _wide_net(*, tied: bool) -> OddNet:
    torch.manual_seed(0)
    return OddNet(tied=tied, vocab=WIDE)


@pytest.mark.slow
@WHOLE
@distributed(world_size=4)
def test_units_larger_than_a_block_are_reduced_in_pieces(
    rank: int, world_size: int, whole: bool
) -> None:
    """As one process would, as the plan says, and no buffer is larger than a block's gradients."""
    names = [name for name, row in STRATEGIES.items() if row.shards_params]
    names = names if whole else ["full_shard"]
    batches = token_batches(3, world_size)
    with nccl_path():
        for strategy, wire, tied in cases(names, WIRES[:2], [False, True], whole=whole):
            expected = train_reference(_wide_net(tied=tied), next_token_loss, batches)
            sizes = Itemsizes(4, 4, 4, None if wire is None else wire.itemsize)
            net, precision = _wide_net(tied=tied), Precision(wire_dtype=wire)
            model = shard_model(net, strategy, precision=precision, dp_shard_size=_half(strategy))
            optimizer = ShardedAdamW(model, lr=1e-2)
            for of_ranks in batches:
                next_token_loss(model, of_ranks[rank][0]).backward()
                optimizer.step()
                optimizer.zero_grad()
            difference = largest_difference(model.state_dict(), expected)
            assert difference <= (1e-6 if wire is None else 2e-2), (strategy, wire, tied)
            planned = planned_events(
                model, net, Prefetch(), "even", sizes, transport=Transport.NCCL
            )
            recorded = recorded_events(model, rank)
            assert recorded == planned, (strategy, wire, tied)
            sent = [event for event in recorded[0] if event.kind == "reduce"]
            largest = max(event.nbytes for event in sent if event.unit.startswith("blocks"))
            pieces = [event for event in sent if event.unit == ("root" if tied else "embed")]
            assert len(pieces) > 8
            assert all(event.nbytes <= largest for event in pieces)


@distributed(world_size=2)
def test_bytes_on_the_wire_are_halved(rank: int, world_size: int) -> None:
    tokens = token_batches(1, world_size)[0][rank][0]
    sent = {}
    with nccl_path():
        for wire in WIRES:
            precision = Precision(param_dtype=torch.bfloat16, wire_dtype=wire)
            model = shard_model(make_net(tied=False), "full_shard", precision=precision)
            with recording(model) as events:
                model(tokens).square().mean().backward()
            sent[wire] = sum(event.nbytes for event in events if event.kind == "reduce")
    assert sent[None] == sent[torch.float32] == 2 * sent[torch.bfloat16] > 0


def test_another_stream_than_that_of_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream(), Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    parameters = ShardedParameters([], torch.device("cuda", 0))
    parameters.check()
    streams.reverse()
    with pytest.raises(EngineError, match="another CUDA stream"):
        parameters.check()
