"""Values on their way from a device to the host, which need not wait for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdpctl.comm.base import Collectives


class Arriving:
    """A copy of `values` that has been started; nothing later changes it."""

    def __init__(self, values: Tensor) -> None:
        """Start to copy them; on the CPU they are there, and belong to this."""
        self._values = values
        self._ready: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = values.to("cpu", non_blocking=True)
            self._ready = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[float]:
        """The values; waits for the device if it has to."""
        if self._ready is not None:
            self._ready.synchronize()
        found: list[float] = self._values.tolist()
        return found


def raised(ranks: Collectives, flags: Sequence[bool], device: torch.device) -> Arriving:
    """How many ranks have raised each of the flags, soon. Collective."""
    own = torch.tensor(flags, dtype=torch.float64)
    if device.type == "cuda":
        own = own.pin_memory().to(device, non_blocking=True)
    return Arriving(ranks.all_reduce(own))
