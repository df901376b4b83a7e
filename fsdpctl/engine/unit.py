"""A unit, its states, and the memory that it is gathered into.

Note: why addresses never change. Autograd saves views of parameters in forward. When a unit is
gathered again for backward, its values return to the same storage at the same offset, so those
views are right again. In between, another unit may have used the slot.

Note: why version counters move. Autograd checks that a saved parameter has the version it had in
forward. A released unit's version is one higher, so a backward that would read memory which now
holds another unit raises an error; gathering the unit again restores the saved version.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fsdpctl.comm.collectives import AllGatherInput, Collectives, Handle
from fsdpctl.engine.flat_buffer import FlatBuffer
from fsdpctl.engine.host_worker import Copier, HostWorker, StreamEvent, pinned_allocations
from fsdpctl.models.module_spec import torch_dtype
from fsdpctl.plan.precision import Dtype

_set_versions = torch._C._autograd._unsafe_set_version_counter


class UnshardBuffer:
    """One storage into which units are gathered, one at a time.

    It is created with its memory, so that views of it can be made; `free` releases the memory.
    """

    def __init__(self, name: str, memory: Tensor, *, is_permanent: bool, sharers: int = 1) -> None:
        """Take `memory`, bytes with a storage of their own, which `sharers` ranks share."""
        self.name = name  # that of its first unit
        self.nbytes = memory.nbytes
        self.is_permanent = is_permanent  # its memory is never released
        self._bytes, self._sharers = memory, sharers

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    @property
    def allocated_nbytes(self) -> int:
        """The bytes that are allocated now; of shared memory, this rank's share."""
        return -(-self._bytes.untyped_storage().nbytes() // self._sharers)

    @property
    def address(self) -> int:
        """The address of its memory; 0 while it has none."""
        return self._bytes.untyped_storage().data_ptr()

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D window of `numel` elements, readable while the slot is allocated."""
        window = torch.empty(0, dtype=dtype, device=self._bytes.device)
        storage = self._bytes.untyped_storage()
        return window.set_(storage, offset_bytes // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]  # torch's stub lacks untyped storages

    def allocate(self) -> None:
        if not self.is_permanent:
            self._bytes.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        """Release the memory, whose readers all ran on the current stream."""
        if not self.is_permanent:
            self._bytes.untyped_storage().resize_(0)


class HostParams:
    """This rank's parts of the parameters, in pinned memory.

    A unit's part is copied into its place within the unit's slot, on a stream of its own, when the
    unit is about to be gathered. Other ranks' parts arrive from there.
    """

    def __init__(self, worker: HostWorker, parts: Iterable[tuple[int, Dtype]]) -> None:
        """Allocate memory for `parts`: elements and dtype of each."""
        self.copier = Copier(worker.device)
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.nbytes = 0
        for (numel, name), count in Counter(parts).items():
            dtype = torch_dtype(name)
            found = self._free.setdefault((numel, dtype), [])
            for together in pinned_allocations(count, numel * dtype.itemsize):
                slab = worker.allocate(together * numel, dtype, pinned=True)
                found += slab.view(together, numel)
                self.nbytes += slab.nbytes

    def send(self, target: Tensor, part: Tensor) -> StreamEvent:
        """Start to copy a part to the device, once earlier work there is done."""
        return self.copier.to_device(target, part)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._free[numel, dtype].pop() if numel else torch.empty(0, dtype=dtype)


class ShardedUnit:
    """Parameters that are gathered, released and reduced together."""

    def __init__(
        self, name: str, buffers: Sequence[FlatBuffer], unshard_buffer: UnshardBuffer
    ) -> None:
        self.name = name
        self.buffers = tuple(buffers)
        self.trained_buffers = tuple(each for each in self.buffers if each.shard.trainable)
        self.nbytes = sum(each.full.nbytes for each in self.buffers)  # unsharded, with padding
        self.unshard_buffer = unshard_buffer
        self.is_unsharded = False  # its parameters can be read; otherwise reading them gives NaN
        self._gather: Handle | None = None
        self._params = tuple(param for buffer in buffers for param in buffer.params)
        self._version = max((param._version for param in self._params), default=0)

    def gather(self, collectives: Collectives, host: HostParams | None) -> None:
        """Start to gather the parameters into the slot, from the `host` if they rest there."""
        self.unshard_buffer.allocate()
        if self.buffers:
            self._gather = collectives.all_gather(
                [_gathering(each, collectives.rank, host) for each in self.buffers]
            )

    def unshard(self) -> None:
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

    def masters_changed(self) -> None:
        """Invalidate every graph that saved the old values."""
        self._version += 2
        self._set_version(self._version + (not self.is_unsharded))

    def _set_version(self, version: int) -> None:
        _set_versions(self._params, (version,) * len(self._params))


def _gathering(buffer: FlatBuffer, rank: int, host: HostParams | None) -> AllGatherInput:
    whole, parts = buffer.full, buffer.layout.shard_spans
    if host is None or not buffer.is_on_host:
        return AllGatherInput(whole, parts, buffer.param_shard)
    own = parts[rank]
    return AllGatherInput(
        whole, parts, ready=host.send(whole[own.start : own.stop], buffer.param_shard)
    )


def bytes_outside_unshard_buffers(units: Sequence[ShardedUnit]) -> int:
    """Return the bytes of parts and master weights that have memory of their own, not in slots.

    What is in host memory does not count.
    """
    buffers = [buffer for unit in units for buffer in unit.buffers]
    values = [buffer.param_shard for buffer in buffers if not buffer.is_on_host]
    for shard in (each.shard for each in buffers if not each.shard.is_on_host):
        values += [each for each in (shard.master, shard.remainder) if each is not None]
    storages = [each.untyped_storage() for each in values]
    # Masters may be windows into parts, and both into slots.
    found = {each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}
    slots = {unit.unshard_buffer.address for unit in units}
    return sum(nbytes for address, nbytes in found.items() if address not in slots)
