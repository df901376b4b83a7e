"""PyTorch's DistributedDataParallel, with the options that the memory estimate assumes.

Gradients are views of DDP's buckets. If the compute dtype is narrower than the parameters' dtype,
forward runs under autocast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.waits import Mark, WaitTime, mark, seconds_between
from fsdpctl.plan.layout import Span, aligned_chunk
from fsdpctl.torch_engines.settings import LocalParam, ParamInitializer, TorchEngineSettings

# The option to broadcast buffers in every forward. Its name depends on the version of torch.
_BROADCAST_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class DdpEngine:
    """A module under DDP: every rank has a replica."""

    shard_rank = 0

    def __init__(
        self,
        module: nn.Module,
        settings: TorchEngineSettings,
        world: Collectives,
        initializer: ParamInitializer,
    ) -> None:
        if settings.compiles:
            import torch._dynamo

            # Otherwise Dynamo would split graphs at DDP's buckets. Blocks are compiled one by one,
            # and are smaller than buckets.
            torch._dynamo.config.optimize_ddp = False
        initializer.initialize(module)
        options: dict[str, Any] = {_BROADCAST_BUFFERS: False}
        self._ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
        self.num_replicas = world.size
        self._device = initializer.device
        self._autocast_dtype = (
            None if settings.param_dtype == settings.master_dtype else settings.param_dtype
        )
        self.local_params = [
            _local_param(name, param, world.rank, world.size)
            for name, param in module.named_parameters()
        ]
        trained = [each.param for each in self.local_params if each.param.requires_grad]
        self._waits = AllReduceWaits(trained, initializer.device)
        self.take_waits = self._waits.take

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        narrows = self._autocast_dtype is not None
        context = (
            torch.autocast(self._device.type, self._autocast_dtype) if narrows else nullcontext()
        )
        with context:
            return self._ddp(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._waits.is_on = False
        try:
            with self._ddp.no_sync():
                yield
        finally:
            self._waits.is_on = True

    def reshard(self) -> None:
        """Do nothing: parameters are always unsharded."""


def _local_param(name: str, param: nn.Parameter, rank: int, num_ranks: int) -> LocalParam:
    """Return the full parameter, of which a rank counts in norms and saves its share."""
    full = Span(0, param.numel())
    share = aligned_chunk(full, rank, num_ranks)
    return LocalParam(name, tuple(param.shape), param, full, share, share, 1)


class AllReduceWaits:
    """A timer from the last gradient of a backward until all gradients are reduced."""

    def __init__(self, params: Sequence[nn.Parameter], device: torch.device) -> None:
        self.is_on = True
        self._on_cuda = device.type == "cuda"
        self._num_params, self._num_missing = len(params), len(params)
        self._mark: Mark | None = None
        for param in params:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, param: Tensor) -> None:
        self._num_missing -= 1
        if self._num_missing > 0:
            return
        self._num_missing = self._num_params
        if self.is_on:
            self._mark = mark(on_cuda=self._on_cuda)

    def take(self) -> WaitTime:
        """Return the time for the backward that has just ended, or 0 without a backward."""
        start, self._mark = self._mark, None
        if start is None:
            return lambda: 0.0
        return partial(seconds_between, start, mark(on_cuda=self._on_cuda))
