"""PyTorch's DistributedDataParallel, as the memory estimate assumes it.

Gradients are views of its buckets. If the compute dtype is narrower than the parameters, it runs
under autocast.
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
from fsdpctl.comm.waits import Mark, Seconds, mark, seconds_between
from fsdpctl.plan.layout import Span, aligned_chunk
from fsdpctl.torch_engines.settings import LocalParam, ParamInitializer, TorchEngineSettings

# The option to broadcast buffers in every forward, by its name in this version of torch.
_BROADCAST_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class DdpEngine:
    """A module of which every rank has a replica."""

    shard_rank = 0

    def __init__(
        self,
        module: nn.Module,
        setup: TorchEngineSettings,
        world: Collectives,
        values: ParamInitializer,
    ) -> None:
        if setup.compiles:
            import torch._dynamo

            # It would split graphs at its buckets; blocks are compiled one by one, and are smaller.
            torch._dynamo.config.optimize_ddp = False
        values.fill(module)
        options: dict[str, Any] = {_BROADCAST_BUFFERS: False}
        self._wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
        self.num_replicas = world.size
        self._device = values.device
        self._narrow = None if setup.param_dtype == setup.master_dtype else setup.param_dtype
        self.locals = [
            _local_param(name, param, world.rank, world.size)
            for name, param in module.named_parameters()
        ]
        trained = [each.param for each in self.locals if each.param.requires_grad]
        self._waits = AllReduceWaits(trained, values.device)
        self.take_waits = self._waits.take

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        narrows = self._narrow is not None
        context = torch.autocast(self._device.type, self._narrow) if narrows else nullcontext()
        with context:
            return self._wrapped(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._waits.is_on = False
        try:
            with self._wrapped.no_sync():
                yield
        finally:
            self._waits.is_on = True

    def reshard(self) -> None:
        """Do nothing: parameters are always unsharded."""


def _local_param(name: str, param: nn.Parameter, rank: int, num_ranks: int) -> LocalParam:
    """Return the whole parameter; each rank counts and saves a share of it."""
    everything = Span(0, param.numel())
    share = aligned_chunk(everything, rank, num_ranks)
    return LocalParam(name, tuple(param.shape), param, everything, share, share, 1)


class AllReduceWaits:
    """The time from the last gradient of a backward until all are reduced."""

    def __init__(self, params: Sequence[nn.Parameter], device: torch.device) -> None:
        self.is_on = True
        self._on_cuda = device.type == "cuda"
        self._count, self._missing = len(params), len(params)
        self._mark: Mark | None = None
        for param in params:
            param.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, param: Tensor) -> None:
        self._missing -= 1
        if self._missing > 0:
            return
        self._missing = self._count
        if self.is_on:
            self._mark = mark(on_cuda=self._on_cuda)

    def take(self) -> Seconds:
        """Return the time of the backward that has just ended; 0 without one."""
        before, self._mark = self._mark, None
        if before is None:
            return lambda: 0.0
        return partial(seconds_between, before, mark(on_cuda=self._on_cuda))
