"""Gradients take one path to their owners over all transports.

So what is tested over gloo holds on GPUs: only the collective itself is another one there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdpctl.comm.collectives import Reduction
from fsdpctl.engine.build import Sharding
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.plan.layout import Span
from fsdpctl.plan.precision import Precision
from tests.distributed import distributed, in_turn
from tests.engine.models import WIDE, make_net, next_token_loss, token_batches
from tests.engine.nccl import nccl_path
from tests.engine.odd import KINDS
from tests.engine.test_parity import WINDOWS, largest_difference, train
from tests.reference import train_reference

GLOO, SHARED, NCCL, DEVICES = "gloo", "shared memory", "NCCL by gloo", "NCCL on emulated devices"
# By window: the functions that make flat buffers of all, of some, and of later gradients.
MADE_BY = {
    "one": ("flatten_gradients", "collect_piece"),
    "last": ("flatten_gradients", "add_gradients"),
}
STEPS = 2


def trained(
    rank: int, world_size: int, transport: str, strategy: str, window: str, precision: Precision
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the state after a few steps, and the flat buffers that this rank reduced."""
    device = torch.device("cuda", rank) if transport == DEVICES else torch.device("cpu")
    batches = token_batches(STEPS, world_size, WINDOWS[window])
    on_device = [[[each.to(device) for each in batch] for batch in of] for of in batches]
    with nccl_path() if transport == NCCL else nullcontext():
        sharding = Sharding(strategy, precision=precision, share_memory=transport == SHARED)
        model = shard_model(make_net(tied=False, vocab=WIDE).to(device), sharding)
        sent: list[Tensor] = []
        right = model.mesh.shard.reduce_scatter

        def recording(whole: Tensor, parts: Sequence[Span]) -> Reduction:
            sent.append(whole.cpu().clone())
            return right(whole, parts)

        with mock.patch.object(model.mesh.shard, "reduce_scatter", recording):
            train(model, rank, on_device, KINDS["odd shapes"], window)
        return {name: each.cpu() for name, each in model.state_dict().items()}, sent


def strategy_over(transport: str) -> str:
    """Parameters in shared memory are not sharded, and units are reduced as a whole."""
    return "shard_optimizer" if transport == SHARED else "full_shard"


def sends_as_over_gloo(rank: int, world_size: int, transport: str) -> None:
    for window in MADE_BY:
        options = strategy_over(transport), window, Precision(torch.bfloat16)
        _, expected = trained(rank, world_size, GLOO, *options)
        _, losses = trained(rank, world_size, transport, *options)
        assert len(losses) == len(expected) > STEPS
        for ours, theirs in zip(losses, expected, strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            assert torch.equal(ours, theirs), (transport, window)


@contextmanager
def one_element_is_wrong(function: str) -> Iterator[None]:
    right: Callable[..., Tensor | None] = getattr(FlatBuffer, function)

    def wrong(self: FlatBuffer, *args: object) -> Tensor | None:
        result = right(self, *args)
        flat = args[0] if result is None else result
        assert isinstance(flat, Tensor)
        flat[0] += 1
        return result

    with mock.patch.object(FlatBuffer, function, wrong):
        yield


def finds_faults(rank: int, world_size: int, transport: str) -> None:
    for window, functions in MADE_BY.items():
        batches = token_batches(STEPS, world_size, WINDOWS[window])
        expected = train_reference(make_net(tied=False, vocab=WIDE), next_token_loss, batches)
        options = strategy_over(transport), window, Precision()
        for function in (None, *functions):
            with one_element_is_wrong(function) if function else nullcontext():
                state, _ = trained(rank, world_size, transport, *options)
            is_unused = function is None or (transport == SHARED and function == "collect_piece")
            is_right = largest_difference(state, expected) <= 1e-6
            assert is_right == is_unused, (transport, window, function)


@distributed(world_size=2)
@in_turn(transport=[SHARED, NCCL])
def test_the_same_buffers_are_sent(rank: int, world_size: int, transport: str) -> None:
    sends_as_over_gloo(rank, world_size, transport)


@distributed(world_size=2)
@in_turn(transport=[GLOO, SHARED, NCCL])
def test_a_fault_in_making_them_is_found(rank: int, world_size: int, transport: str) -> None:
    finds_faults(rank, world_size, transport)


@pytest.mark.slow
@distributed(world_size=2, on_devices=True)
def test_devices_take_the_same_path(rank: int, world_size: int) -> None:
    sends_as_over_gloo(rank, world_size, DEVICES)
    finds_faults(rank, world_size, DEVICES)
