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
from fsdpctl.comm.waits import GetWaitSeconds, TimeStamp, seconds_between, time_stamp
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

    shard_rank = 0  # parameters are not sharded

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
        device, dtype = initializer.device, settings.compute_dtype
        self._context = partial(torch.autocast, device.type, dtype) if dtype else nullcontext
        params = module.named_parameters()
        self.local_params = [_local_param(name, param, world) for name, param in params]
        trained = [each.param for each in self.local_params if each.param.requires_grad]
        self._waits = AllReduceWaits(trained, device)
        self.take_waits = self._waits.take

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
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


def _local_param(name: str, param: nn.Parameter, world: Collectives) -> LocalParam:
    """Return a full parameter; this rank counts its share in norms and saves it."""
    full, shape = Span(0, param.numel()), tuple(param.shape)
    share = aligned_chunk(full, world.rank, world.size)
    return LocalParam(name, shape, param, full, owned_span=share, saved_span=share, num_owners=1)


class AllReduceWaits:
    """A timer from the last gradient of a backward until all gradients are reduced.

    Each backward must reach every parameter, or the count of missing gradients drifts.
    """

    def __init__(self, params: Sequence[nn.Parameter], device: torch.device) -> None:
        self.is_on = True  # False in `no_sync`, whose gradients count too
        self._on_cuda = device.type == "cuda"
        self._num_params, self._num_missing = len(params), len(params)
        self._mark: TimeStamp | None = None
        for param in params:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, param: Tensor) -> None:
        # In a thread of autograd, on the stream of backward.
        self._num_missing -= 1
        if self._num_missing > 0:
            return
        self._num_missing = self._num_params
        if self.is_on:
            self._mark = time_stamp(on_cuda=self._on_cuda)

    def take(self) -> GetWaitSeconds:
        """Call on backward's stream; return a function for the wait, 0 without a backward."""
        start, self._mark = self._mark, None
        if start is None:
            return lambda: 0.0
        return partial(seconds_between, start, time_stamp(on_cuda=self._on_cuda))
