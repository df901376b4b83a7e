"""A unit, its states, and its unshard buffer.

Note: why saved views stay valid. Autograd saves views of parameters in forward. When a unit is
gathered again for backward, its values return to the same storage at the same offset, even if the
storage has another address. In between, another unit may have used the unshard buffer.

Note: why version counters change. Autograd checks that a saved parameter has the version that it
had in forward. A freed unit has a version higher by one: a backward that would read memory of
another unit raises an error. Gathering the unit again restores the saved version. New master
weights raise the version by two, so that no graph of the old weights matches it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fsdpctl.comm.collectives import AllGatherInput, Collectives, Handle
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.host_worker import Copier, CudaEvent, HostWorker, pinned_allocations
from fsdpctl.models.module_spec import torch_dtype
from fsdpctl.plan.precision import Dtype

_set_versions = torch._C._autograd._unsafe_set_version_counter


class UnshardBuffer:
    """A storage into which units are gathered, one at a time.

    It is created with memory, so that views can be made. `free` resizes the storage to 0, and views
    stay valid for the next `allocate`.
    """

    def __init__(
        self, name: str, memory: Tensor, *, is_permanent: bool, num_sharers: int = 1
    ) -> None:
        """Take `memory`, uint8 elements with their own storage; `num_sharers` ranks share it."""
        self.name = name  # the first unit that uses the buffer
        self.nbytes, self.device = memory.nbytes, memory.device
        self.is_permanent = is_permanent  # the memory is never freed
        self._bytes, self._num_sharers = memory, num_sharers

    @property
    def allocated_nbytes(self) -> int:
        """The bytes that are allocated now; for shared memory, this rank's equal share."""
        return -(-self._bytes.untyped_storage().nbytes() // self._num_sharers)

    @property
    def address(self) -> int:
        """The address of the memory; 0 while no memory is allocated."""
        return self._bytes.untyped_storage().data_ptr()

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D view of `numel` elements, readable while the memory is allocated."""
        window = torch.empty(0, dtype=dtype, device=self.device)
        storage = self._bytes.untyped_storage()
        return window.set_(storage, offset_bytes // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]  # torch's stub lacks untyped storages

    def allocate(self) -> None:
        if not self.is_permanent:
            self._bytes.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        """Free the memory. All kernels that read it must be on the current stream.

        The allocator gives the memory to later allocations on the current stream, so a kernel on
        another stream could read their values.
        """
        if not self.is_permanent:
            self._bytes.untyped_storage().resize_(0)


class HostParamPool:
    """Pinned host memory for this rank's shards, and the copies from it to the device.

    Before a unit is gathered, its shard is copied to its position in the unshard buffer, on a
    separate stream. The all-gather is in place and starts after that copy.
    """

    def __init__(self, worker: HostWorker, shards: Iterable[tuple[int, Dtype]]) -> None:
        """Allocate memory for `shards`: the number of elements and the dtype of each shard."""
        self.copier = Copier(worker.device)
        self._unused: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.nbytes = 0
        for (numel, dtype_name), count in Counter(shards).items():
            dtype = torch_dtype(dtype_name)
            tensors = self._unused.setdefault((numel, dtype), [])
            # Several shards share an allocation, since torch rounds its size to a power of two.
            for num_shards in pinned_allocations(count, numel * dtype.itemsize):
                slab = worker.allocate(num_shards * numel, dtype, pinned=True)
                tensors += slab.view(num_shards, numel)
                self.nbytes += slab.nbytes

    def copy_to_device(self, target: Tensor, shard: Tensor) -> CudaEvent:
        """Start to copy a shard after the device's earlier work, which may read `target`."""
        return self.copier.copy_to_device(target, shard)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return unused memory for a shard."""
        return self._unused[numel, dtype].pop() if numel else torch.empty(0, dtype=dtype)


class ShardedUnit:
    """The parameters that are gathered, freed and reduced together."""

    def __init__(self, name: str, buffers: Sequence[FlatBuffer], memory: UnshardBuffer) -> None:
        self.name = name
        self.buffers = tuple(buffers)
        self.trained_buffers = tuple(each for each in self.buffers if each.shard.trainable)
        self.nbytes = sum(each.full.nbytes for each in self.buffers)  # unsharded, with padding
        self.unshard_buffer = memory
        self.is_unsharded = False  # whether parameters can be read; sharded ones read NaN
        self._gather: Handle | None = None
        self._params = tuple(param for buffer in buffers for param in buffer.params)
        self._version = max((param._version for param in self._params), default=0)

    def start_gather(self, collectives: Collectives, host: HostParamPool | None) -> None:
        """Start to gather the parameters into the unshard buffer, from `host` if stored there."""
        self.unshard_buffer.allocate()
        if self.buffers:
            inputs = [_gather_input(each, collectives.rank, host) for each in self.buffers]
            self._gather = collectives.all_gather(inputs)

    def unshard(self) -> None:
        """Wait for the gather, and let the parameters read the unshard buffer."""
        self._wait()
        for buffer in self.buffers:
            buffer.use_unsharded()
        self.is_unsharded = True
        self._set_version(self._version)

    def free(self) -> None:
        self._wait()
        for buffer in self.buffers:
            buffer.use_sharded()
        self.is_unsharded = False
        self._set_version(self._version + 1)
        self.unshard_buffer.free()

    def _wait(self) -> None:
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def invalidate_graphs(self) -> None:
        """Let autograd raise an error for graphs that saved the old values."""
        self._version += 2
        self._set_version(self._version + (not self.is_unsharded))

    def _set_version(self, version: int) -> None:
        _set_versions(self._params, (version,) * len(self._params))


def _gather_input(buffer: FlatBuffer, rank: int, host: HostParamPool | None) -> AllGatherInput:
    full, spans = buffer.full, buffer.layout.shard_spans
    if host is None or not buffer.is_on_host:
        return AllGatherInput(full, spans, buffer.param_shard)
    span = spans[rank]
    ready = host.copy_to_device(full[span.start : span.stop], buffer.param_shard)
    return AllGatherInput(full, spans, ready=ready)


def bytes_outside_unshard_buffers(units: Sequence[ShardedUnit]) -> int:
    """Return the bytes of stored parameters and masters on the device, outside unshard buffers."""
    buffers = [buffer for unit in units for buffer in unit.buffers]
    tensors = [buffer.param_shard for buffer in buffers if not buffer.is_on_host]
    for shard in (buffer.shard for buffer in buffers if not buffer.shard.is_on_host):
        tensors += [x for x in (shard.master, shard.remainder) if x is not None]  # lower bits
    storages = [tensor.untyped_storage() for tensor in tensors]
    # Masters may be views of stored parameters, and both may be views of unshard buffers.
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    addresses = {unit.unshard_buffer.address for unit in units}
    return sum(nbytes for address, nbytes in sizes.items() if address not in addresses)
