"""Parameters at rest in host memory, from where units are gathered.

A unit's part is copied into its place within the unit's slot, on a stream of its own, when the unit
is about to be gathered. Other ranks' parts arrive from there.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from fsdpctl.comm.host import Copier, HostWorker, Moment
from fsdpctl.engine.describe import torch_dtype
from fsdpctl.plan.precision import Dtype
from fsdpctl.plan.step import pinned_groups


class HostParams:
    """This rank's parts of the parameters, in pinned memory."""

    def __init__(self, worker: HostWorker, parts: Iterable[tuple[int, Dtype]]) -> None:
        """Allocate memory for `parts`: elements and dtype of each."""
        self._copier = Copier(worker.device)
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.nbytes = 0
        for (numel, name), count in Counter(parts).items():
            dtype = torch_dtype(name)
            found = self._free.setdefault((numel, dtype), [])
            for together in pinned_groups(count, numel * dtype.itemsize):
                slab = worker.allocate(together * numel, dtype, pinned=True)
                found += slab.view(together, numel)
                self.nbytes += slab.nbytes

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a part."""
        return self._free[numel, dtype].pop() if numel else torch.empty(0, dtype=dtype)

    def send(self, target: Tensor, part: Tensor) -> Moment:
        """Start to copy a part to the device, once earlier work there is done."""
        return self._copier.up(target, part)

    def settle(self) -> None:
        """Wait until no copy reads the parts."""
        self._copier.settle()
