"""Operations that make the host wait for a CUDA device, counted on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import GradAccumulator
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import record_step
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.matrix import WHOLE, cases


class _Reads(TorchDispatchMode):
    """A mode that counts the values that the host reads: `.item()`, `.tolist()`, `if tensor:`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Record reads of tensors, and copies from pageable memory by `torch.tensor(…, device=…)`."""
    results: list[str] = []
    tensor, tolist = torch.tensor, torch.Tensor.tolist

    def counted_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            results.append("torch.tensor on a device")
        return tensor(*args, **kwargs)

    def listed(self: torch.Tensor) -> Any:
        results.append("tolist")
        return tolist(self)

    with pytest.MonkeyPatch.context() as patch, _Reads() as reads:
        patch.setattr(torch, "tensor", counted_tensor)
        patch.setattr(torch.Tensor, "tolist", listed)
        yield results
    results += ["item"] * reads.count


def step_waits(rank: int, strategy: str, reduce: Any, *, evaluates: bool, skips: bool) -> list[str]:
    """Return the waits in the last of five steps of two micro-batches each."""
    net = make_net(tied=False)
    if skips:
        net.never_used = nn.Linear(5, 7)
    model = shard_model(net, strategy)
    optimizer = ShardedAdamW(model, lr=1e-3)
    accumulator = GradAccumulator(model, steps=2, reduce=reduce)
    ones = torch.ones(())
    for of_ranks in token_batches(5, 2, micro_steps=2):
        with counted() as waits:
            for batch in of_ranks[rank]:
                with accumulator.micro_step():
                    loss = next_token_loss(model, batch)
                    loss.backward()
            record = record_step(
                model, loss_sum=loss.detach(), tokens=ones, nominal_tokens=2, max_grad_norm=0.5
            )
            optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
            optimizer.zero_grad()
            if evaluates:
                with torch.no_grad():
                    next_token_loss(model, of_ranks[rank][0])
    return waits


@pytest.mark.slow
@WHOLE
@distributed(world_size=2, timeout=200)
def test_a_step_does_not_wait_for_tensors(rank: int, world_size: int, whole: bool) -> None:
    switches = [False, True]
    chosen = cases(list(STRATEGIES), ["every", "last"], switches, switches, whole=whole)
    for strategy, reduce, evaluates, skips in chosen:
        result = step_waits(rank, strategy, reduce, evaluates=evaluates, skips=skips)
        # The fingerprints of gathers; on CUDA they are compared a step later.
        allowed = ["item"] * STRATEGIES[strategy].shards_params
        # The optimizer does not step parameters without a gradient on any rank.
        allowed += ["tolist"] * skips
        assert sorted(result) == sorted(allowed), (strategy, reduce, evaluates, skips)


def test_a_wait_for_a_tensor_is_detected():
    with counted() as num_bytes:
        torch.ones(3).sum().item()
        torch.ones(3).tolist()
        torch.tensor([1.0], device="cpu")
        if torch.ones(()):
            torch.ones(3)
    assert sorted(num_bytes) == ["item", "item", "tolist", "torch.tensor on a device"]
