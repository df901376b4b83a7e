"""The engine on CUDA devices: losses of the CPU, no race, and no wait of the host.

The fast tests of devices are all here, so that one worker of the fast suite starts devices.
"""

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.checkpoint.staging import StagingMemory
from fsdpctl.comm.collectives import AllGatherInput
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.config.compose import compose_config
from fsdpctl.config.decoder_config import config_value
from fsdpctl.engine.offloaded_inputs import OffloadedInput
from fsdpctl.models import build_model
from fsdpctl.plan.layout import Span
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.emulated.cases import Case, every_case
from tests.engine.models import next_token_loss, token_batches
from tests.engine.odd import checkpoint_all
from tests.engine.test_host_inputs import Chain, Dropping
from tests.matrix import fast


@pytest.mark.parametrize(("case", "world_size"), [
    (Case("full_shard", precision="bf16"), 2),
    pytest.param(Case("hybrid_shard", window="last"), 4, marks=pytest.mark.slow),
], ids=["full_shard", "hybrid_shard"])  # fmt: skip
@pytest.mark.parametrize("seed", fast(0, slow=[1, 2]))
@distributed(timeout=120, on_devices=True)
def test_strategies_give_the_losses_of_cpu_ranks(rank, world_size, case, seed):
    case.check(rank, world_size)


@distributed(world_size=4, timeout=60, on_devices=True)
def test_uneven_parts_are_gathered_and_reduced_in_one_launch(rank: int, world_size: int) -> None:
    device = torch.device("cuda", rank)
    parts = [Span(0, 64), Span(64, 64), Span(64, 256), Span(256, 320)]  # rank 1: empty
    local_part = parts[rank]
    ranks = NcclCollectives(device)
    whole = torch.full((320,), -1.0, device=device)
    whole[local_part.start : local_part.stop] = rank
    ranks.all_gather([AllGatherInput(whole, parts)]).wait()
    wanted = torch.cat([torch.full((part.numel,), float(i)) for i, part in enumerate(parts)])
    assert torch.equal(whole.cpu(), wanted)
    out = torch.empty(local_part.numel, device=device)
    ranks.reduce_scatter(whole, parts).finish(out, 1.0, torch.float32)
    assert torch.equal(out.cpu(), 4 * wanted[local_part.start : local_part.stop])
    groups: Any = dist.ProcessGroupNCCL
    assert groups.groups() == [3, 3]


@distributed(world_size=4, timeout=60, on_devices=True)
def test_replicas_combine_right_behind_a_reduction_on_its_stream(rank, world_size):
    """The compute stream does not wait between the two collectives."""
    device, order = torch.device("cuda", rank), list[tuple[str, bool]]()
    model = Case("hybrid_shard").model(device, world_size)
    (batch,) = token_batches(1, world_size, 1)[0][rank]
    assert isinstance(model.mesh.shard, NcclCollectives)
    stream = model.mesh.shard.reduce_stream

    def noting(owner: Any, name: str) -> Any:
        plain = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            order.append((name, torch.cuda.current_stream() == stream))
            return plain(*args, **more)

        return mock.patch.object(owner, name, noted)

    with noting(NcclCollectives, "reduce_scatter"), noting(NcclCollectives, "start_all_reduce"):
        next_token_loss(model, batch.to(device)).backward()
    *pairs, presence = order
    assert presence == ("start_all_reduce", False)
    assert len(pairs) >= 2 * 3
    assert pairs == [("reduce_scatter", False), ("start_all_reduce", True)] * (len(pairs) // 2)


@distributed(world_size=1, on_devices=True)
def test_large_matrices_are_drawn_on_the_device_by_name(rank, world_size, monkeypatch):
    model = compose_config([]).config.model
    monkeypatch.setattr(build_model, "MIN_DRAWN_ON_DEVICE", 4096)
    monkeypatch.setattr(build_model, "_ELEMENTS_AT_ONCE", 512)

    def drawn(name: str, width: int) -> torch.Tensor:
        whole = torch.empty(64, width, device="cuda", dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        build_model.initialize_parameter(name, whole, seed=0, config=model)
        # A few elements are drawn at a time.
        assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() <= 3 * 512 * 4
        return whole

    torch.cuda.set_sync_debug_mode("error")  # no value is copied from the host
    one, again, other = (drawn(name, 64) for name in ("a.weight", "a.weight", "b.weight"))
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    spread = config_value(model, "initializer_range")
    assert one.float().std().item() == pytest.approx(spread, rel=0.05)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        drawn("a.weight", 16)  # a small matrix is drawn on the host
    torch.cuda.set_sync_debug_mode("default")


@distributed(world_size=1, on_devices=True)
def test_memory_for_the_first_save_is_pinned_beforehand(rank: int, world_size: int) -> None:
    tensors = [torch.randn(n, device="cuda") for n in (700, 3)]
    staging = StagingMemory()
    staging.prepare(tensors)
    assert staging._preparing is not None
    staging._preparing.join()
    pinned = [each.data_ptr() for each in staging._chunks]
    copies = staging.copy(tensors)
    assert copies[0].is_pinned()
    assert copies[0].data_ptr() == pinned[0]
    assert [each.data_ptr() for each in staging._chunks] == pinned
    assert all(torch.equal(one, other.cpu()) for one, other in zip(copies, tensors, strict=True))


@distributed(timeout=60, on_devices=True)
def backward_fails(rank: int, world_size: int, waits: bool) -> None:
    """Fail in the recomputation of block 3, while the input of block 2 is fetched."""
    net = Chain().to(torch.device("cuda", rank))
    blocks, right = list(net.blocks), Dropping.forward
    calls: list[int] = []

    def failing(self: Dropping, *args: Any, **more: Any) -> Tensor:
        calls.append(blocks.index(self))
        if calls.count(3) == 2:
            raise ValueError("planted")
        return right(self, *args, **more)

    if not waits:
        OffloadedInput.__del__ = lambda self: None  # type: ignore[method-assign]
    with mock.patch.object(Dropping, "forward", failing):
        checkpoint_all(blocks, "full", offload=True)
        with pytest.raises(ValueError, match="planted"):
            net(torch.randn(4, 16, device="cuda")).backward()
    while any(isinstance(each, OffloadedInput) for each in gc.get_objects()):
        gc.collect()  # for a while, the exception and the backward thread refer to the graph
    torch.ones(1, device="cuda").add(1)


def test_an_unused_input_arrives_before_its_memory_is_used_again() -> None:
    backward_fails(world_size=1, waits=True)


def test_without_this_wait_a_race_is_detected() -> None:
    with pytest.raises(AssertionError, match="freed too early"):
        backward_fails(world_size=1, waits=False)


def orders() -> list[tuple[str, int, int]]:
    """Return each strategy on 1, 2 and 4 ranks, and on the fewest ranks with 19 more seeds.

    A case runs with three of those seeds, and each seed has cases of every strategy.
    """
    results = [(name, ranks, 0) for name in STRATEGIES for ranks in (1, 2, 4)]
    for name, row in STRATEGIES.items():
        results += [(name, 4 if row.replicates else 2, seed) for seed in range(1, 20)]
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size", "seed"), orders())
@distributed(timeout=600, on_devices=True)
def test_cases_give_the_losses_of_cpu_ranks_in_any_kernel_order(rank, world_size, strategy, seed):
    of_strategy = (case for case in every_case() if case.strategy == strategy)
    for position, case in enumerate(of_strategy):
        if seed in (0, 1 + position % 4, 5 + position % 5, 10 + position % 10):
            case.check(rank, world_size)
