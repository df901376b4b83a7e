"""Users' training loops on CUDA devices, with the calls of docs/python-api.md."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fsdpctl
from docs.examples.conv_net import ConvNet, make_batch
from tests.distributed import distributed

STEPS = 3


def losses_of(device: torch.device, folder: Path, strategy: str, torchs_own: bool) -> list[Tensor]:
    """Return the losses of each step, of a new model from a checkpoint, and of its full weights."""
    rank = dist.get_rank()

    def loss_of(of: torch.nn.Module, number: int) -> Tensor:
        images, labels = (each.to(device) for each in make_batch(number, rank, size=4))
        loss: Tensor = F.cross_entropy(of(images), labels)
        return loss

    def make() -> fsdpctl.ShardedModel:
        torch.manual_seed(rank)  # rank 0's weights are used
        return fsdpctl.shard_model(ConvNet(channels=8, depth=2).to(device), strategy)

    model = make()
    if torchs_own:
        optimizer = torch.optim.AdamW(model.flat_parameters(), lr=3e-3)
    else:
        optimizer = fsdpctl.ShardedAdamW(model, lr=3e-3, weight_decay=0.01)
        model.overlap_param_gather = True
    accumulator = fsdpctl.GradAccumulator(model, steps=2, reduce="last")
    results = []
    for step in range(STEPS):
        for half in range(2):
            with accumulator.micro_step():
                loss = loss_of(model, 2 * step + half)
                loss.backward()
            results.append(loss.detach())
        results.append(fsdpctl.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        results.append(loss_of(model, 99))
        with model.full_parameters():
            results += [each.abs().mean() for each in model.module.parameters()]
        if not torchs_own:
            fsdpctl.save_checkpoint(folder, model, optimizer)
            again = make()
            fsdpctl.load_checkpoint(folder, again, fsdpctl.ShardedAdamW(again))
            results.append(loss_of(again, 99))
    return [each.cpu() for each in results]


@pytest.mark.slow
@pytest.mark.parametrize("torchs_own", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@distributed(world_size=2, timeout=300, on_devices=True)
def test_it_has_the_losses_of_cpu_ranks(rank, world_size, tmp_path, strategy, torchs_own):
    results, expected = (
        torch.stack(losses_of(torch.device(*device), tmp_path / device[0], strategy, torchs_own))
        for device in (("cuda", rank), ("cpu",))
    )
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-6)
