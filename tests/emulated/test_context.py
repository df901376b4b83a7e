"""Context parallelism on CUDA devices: the exchange and other streams wait for each other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.config.compose import compose_config
from fsdpctl.data.batches import MicroBatch
from fsdpctl.plan.batch_plan import ContextParallel
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import enable_context_parallel, make_model
from fsdpctl.training.decoder_loss import summed_loss
from tests.commands.run import TINY
from tests.distributed import distributed

ARGS = [*TINY, "precision=fp32", "launch.nproc_per_node=2", "model.vocab_size=64",
        "train.context_parallel=2", "activation_checkpointing=full"]  # fmt: skip


def losses(rank: int, device: torch.device) -> Tensor:
    """Return the losses of two steps, between which gradients are reduced."""
    composed = compose_config([*ARGS, f"launch.device={device.type}"])
    config = stored_config(assign_ranks(composed.config))
    enable_context_parallel(device, 2, 2)
    model = make_model(config, device)
    generator = torch.Generator().manual_seed(0)
    results = []
    for _ in range(2):
        tokens = torch.randint(64, (2, 128), generator=generator).chunk(2, 1)[rank]
        batch = MicroBatch(tokens, tokens.clone(), ((128,),) * 2, ContextParallel(2, rank))
        loss = summed_loss(model, batch, device, 0)
        loss.backward()
        results.append(loss.detach())
    norms = [shard.grad.norm() for shard in model.flat_shards() if shard.grad is not None]
    return torch.stack([each.cpu() for each in (*results, *norms)])


def on_another_stream(self: NcclCollectives, values: Tensor) -> Tensor:
    """Exchange without waits before and after the exchange."""
    with torch.cuda.stream(self.reduce_stream):
        return _right(self, values)


_right = NcclCollectives.all_to_all


@distributed(world_size=2, timeout=60, on_devices=True)
def trained(rank: int, world_size: int, seed: int, *, planted: bool) -> None:
    if planted:
        owner: Any = NcclCollectives
        owner.all_to_all = on_another_stream
    result = losses(rank, torch.device("cuda", rank))
    torch.testing.assert_close(result, losses(rank, torch.device("cpu")), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_exchange_follows_what_it_sends(seed: int) -> None:
    trained(seed=seed, planted=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_exchange_that_waits_for_nothing_is_found(seed: int) -> None:
    with pytest.raises(AssertionError, match=r"race: .* on stream|freed too early"):
        trained(seed=seed, planted=True)
