"""PyTorch's `fully_shard`, with the units that the memory estimate assumes.

Each block is a unit, and the other parameters are the root unit. The root and the last block stay
unsharded after forward: the backward of the last block comes next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdpctl.comm.collectives import Collectives
from fsdpctl.comm.process_group import all_gather_single, reduce_scatter_single
from fsdpctl.comm.waits import HostWaits, TakeWaits
from fsdpctl.plan.layout import Span, aligned_chunk
from fsdpctl.torch_engines.settings import LocalParam, ParamInitializer, TorchEngineSettings


class Fsdp2Engine:
    """A module on which `fully_shard` was called: on its blocks, then on itself."""

    def __init__(
        self,
        module: nn.Module,
        settings: TorchEngineSettings,
        world: Collectives,
        initializer: ParamInitializer,
    ) -> None:
        """Shard `module` in place: its parameters become DTensors. Collective."""
        device_type = initializer.device.type
        mesh = _mesh(device_type, world.size, settings.ranks_per_replica)
        shard = partial(fully_shard, mesh=mesh, mp_policy=_policy(settings))
        self._root, self._blocks = module, [module.get_submodule(name) for name in settings.blocks]
        for block in self._blocks:
            # Shard each block before the next one is allocated, so that no rank has the full model.
            initializer.initialize(block)
            reshard = settings.reshard_after_forward and block is not self._blocks[-1]
            shard(block, reshard_after_forward=reshard)
        initializer.initialize(module)
        shard(module, reshard_after_forward=False)
        _set_prefetch(list(_fsdp_modules(self._blocks)), settings)
        num_shards = settings.ranks_per_replica
        replica, self.shard_rank = divmod(world.rank, num_shards)
        self.num_replicas = world.size // num_shards
        position = self.shard_rank, num_shards, replica, self.num_replicas
        params = module.named_parameters()
        self.local_params = [_local_param(name, param, *position) for name, param in params]
        self._waits = HostWaits()
        # On the CPU, the host waits inside each collective, which can be timed. On CUDA, streams
        # wait instead. `fully_shard` has no hook for its all-reduce over replicas.
        is_observable = device_type == "cpu" and self.num_replicas == 1
        if is_observable:
            _time_collectives(self._units(), self._waits)
        self.take_waits: TakeWaits | None = self._waits.take if is_observable else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._root(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        (root,) = _fsdp_modules([self._root])
        root.set_requires_gradient_sync(False)  # recursive: its blocks, too
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def reshard(self) -> None:
        """Free the parameters that a forward without a backward has left unsharded."""
        for unit in self._units():
            unit.reshard()

    def _units(self) -> Iterator[FSDPModule]:
        return _fsdp_modules([self._root, *self._blocks])


def _fsdp_modules(modules: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    for module in modules:
        assert isinstance(module, FSDPModule)
        yield module


def _mesh(device_type: str, num_ranks: int, ranks_per_replica: int) -> DeviceMesh:
    if ranks_per_replica == num_ranks:
        return init_device_mesh(device_type, (num_ranks,))
    # In two dimensions, `fully_shard` replicates over the first one.
    shape = (num_ranks // ranks_per_replica, ranks_per_replica)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def _policy(settings: TorchEngineSettings) -> MixedPrecisionPolicy:
    """Return the policy. Inputs of units are not cast, since that would round rotary embeddings."""
    dtypes = settings.compute_dtype, settings.reduce_dtype
    return MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False)


def _set_prefetch(blocks: Sequence[FSDPModule], settings: TorchEngineSettings) -> None:
    """Request prefetch of more than one unit; `fully_shard` prefetches one by default."""
    forward, backward = settings.prefetch.forward, settings.prefetch.backward
    for index, block in enumerate(blocks):
        if forward > 1:
            block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + forward]))
        if backward > 1:
            earlier = blocks[max(0, index - backward) : index]
            block.set_modules_to_backward_prefetch(list(reversed(earlier)))


def _local_param(
    name: str, param: nn.Parameter, rank: int, num_shards: int, replica: int, num_replicas: int
) -> LocalParam:
    """Return this rank's shard of a parameter, as `fully_shard` splits dimension 0.

    Each rank of a replica has ceil(rows / num_shards) rows; the last ranks may have fewer or none.
    """
    assert isinstance(param, DTensor)
    rows = param.shape[0]
    max_rows, row_numel = -(-rows // num_shards), param.numel() // max(1, rows)
    start, stop = (min(rows, max_rows * x) * row_numel for x in (rank, rank + 1))
    span = Span(start, stop)
    assert param.to_local().numel() == span.numel
    saved_span = aligned_chunk(span, replica, num_replicas)
    return LocalParam(name, tuple(param.shape), param, span, span, saved_span, num_replicas)


class _TimedCollective:
    """A collective for `fully_shard` that measures how long the host waits inside it."""

    def __init__(self, collective: Callable[..., Any], waits: HostWaits) -> None:
        self._collective, self._waits = collective, waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer, as `fully_shard` requires of its collectives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        """Run the collective, which blocks: `fully_shard` does not set `async_op` by default."""
        collective = partial(self._collective, output_tensor, input_tensor, **kwargs)
        return self._waits.measure(collective)


def _time_collectives(units: Iterator[FSDPModule], waits: HostWaits) -> None:
    gather: Any = _TimedCollective(all_gather_single, waits)
    reduce: Any = _TimedCollective(reduce_scatter_single, waits)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
