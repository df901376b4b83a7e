"""PyTorch's `fully_shard`, with the units that the memory estimate assumes.

Each block is a unit, and everything else is the root. After forward, neither the root is freed nor
the last block, whose backward comes next.
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
from fsdpctl.comm.waits import HostWaits, Seconds
from fsdpctl.plan.layout import Span, aligned_chunk
from fsdpctl.torch_engines.settings import LocalParam, ParamInitializer, TorchEngineSettings


class Fsdp2Engine:
    """A module on which `fully_shard` was called: on its blocks, then on itself."""

    def __init__(
        self,
        module: nn.Module,
        setup: TorchEngineSettings,
        world: Collectives,
        values: ParamInitializer,
    ) -> None:
        """Shard `module` in place: its parameters become DTensors. Collective."""
        device_type = values.device.type
        mesh = _mesh(device_type, world.size, setup.ranks_per_replica)
        shard = partial(fully_shard, mesh=mesh, mp_policy=_policy(setup))
        self._root, self._blocks = module, [module.get_submodule(name) for name in setup.blocks]
        for block in self._blocks:
            values.fill(block)  # one after another, so that no rank ever has all of them unsharded
            reshards = setup.reshard_after_forward and block is not self._blocks[-1]
            shard(block, reshard_after_forward=reshards)
        values.fill(module)
        shard(module, reshard_after_forward=False)
        _set_prefetch(list(_sharded(self._blocks)), setup)
        num_replicas = self.num_replicas = world.size // setup.ranks_per_replica
        self.shard_rank = world.rank % setup.ranks_per_replica
        copy = world.rank // setup.ranks_per_replica
        self.locals = [
            _local_param(
                name, param, (self.shard_rank, setup.ranks_per_replica), (copy, num_replicas)
            )
            for name, param in module.named_parameters()
        ]
        self._waits = HostWaits()
        # On the CPU, the host waits within each collective. On CUDA, streams wait, which is not
        # observable, nor are the sums over replicas.
        knows = device_type == "cpu" and num_replicas == 1
        if knows:
            _time_collectives(self._all(), self._waits)
        self.take_waits: Callable[[], Seconds] | None = self._waits.take if knows else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._root(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        (root,) = _sharded([self._root])
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def reshard(self) -> None:
        """Free what a forward without a backward has left unsharded."""
        for each in self._all():
            each.reshard()

    def _all(self) -> Iterator[FSDPModule]:
        return _sharded([self._root, *self._blocks])


def _sharded(modules: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    for each in modules:
        assert isinstance(each, FSDPModule)
        yield each


def _mesh(device_type: str, num_ranks: int, ranks_per_replica: int) -> DeviceMesh:
    if ranks_per_replica == num_ranks:
        return init_device_mesh(device_type, (num_ranks,))
    shape = (num_ranks // ranks_per_replica, ranks_per_replica)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def _policy(setup: TorchEngineSettings) -> MixedPrecisionPolicy:
    """Return the dtypes; inputs are not cast, because position tables must not be rounded."""
    narrows = setup.param_dtype != setup.master_dtype
    return MixedPrecisionPolicy(
        param_dtype=setup.param_dtype if narrows else None,
        reduce_dtype=setup.reduce_dtype,
        cast_forward_inputs=False,
    )


def _set_prefetch(blocks: Sequence[FSDPModule], setup: TorchEngineSettings) -> None:
    """Request prefetch of more than one unit; `fully_shard` prefetches one by default."""
    forward, backward = setup.prefetch.forward, setup.prefetch.backward
    for place, block in enumerate(blocks):
        if forward > 1:
            block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 1 + forward]))
        if backward > 1:
            before = blocks[max(0, place - backward) : place]
            block.set_modules_to_backward_prefetch(list(reversed(before)))


def _local_param(
    name: str, param: nn.Parameter, part: tuple[int, int], copy: tuple[int, int]
) -> LocalParam:
    """Return this rank's part: rows are cut into equal chunks; the last ranks may have fewer."""
    assert isinstance(param, DTensor)
    index, count = part
    rows = param.shape[0]
    numel, size = param.numel(), -(-rows // count)
    start, stop = (min(rows, size * x) * (numel // max(1, rows)) for x in (index, index + 1))
    held = Span(start, stop)
    assert param.to_local().numel() == held.numel
    copy_index, num_replicas = copy
    written = aligned_chunk(held, copy_index, num_replicas)
    return LocalParam(name, tuple(param.shape), param, held, held, written, num_replicas)


class _TimedCollective:
    """A collective of `fully_shard` that counts how long the host waits for it."""

    def __init__(self, collective: Callable[..., Any], waits: HostWaits) -> None:
        self._collective, self._waits = collective, waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        """Run the collective; with `async_op`, return a handle."""
        result: Any = None

        def run() -> None:
            nonlocal result
            result = self._collective(output_tensor, input_tensor, **kwargs)

        self._waits.around(run)
        return result


def _time_collectives(units: Iterator[FSDPModule], waits: HostWaits) -> None:
    gather: Any = _TimedCollective(all_gather_single, waits)
    reduce: Any = _TimedCollective(reduce_scatter_single, waits)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
