"""The memory that units are gathered into, one unit at a time.

Note: why addresses never change. Autograd saves views of parameters in forward. When a unit is
gathered again for backward, its values return to the same storage at the same offset, so those
views are right again. Between, another unit may have used the slot; see unit.py for the guard.
"""

import torch
from torch import Tensor


class Slot:
    """One storage, and the name of the unit whose parameters it holds or is about to hold.

    It is born with its memory, so that views of it can be made; `give_back` ends that.
    """

    def __init__(self, name: str, nbytes: int, device: torch.device, *, resident: bool) -> None:
        self.name = name  # that of its first unit
        self.nbytes = nbytes
        self.owner: str | None = None
        self.content: str | None = None  # whose values are in it, also after it was given back
        self.resident = resident  # its memory stays for good
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._bytes.device

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that it takes now."""
        return self._bytes.untyped_storage().nbytes()

    @property
    def address(self) -> int:
        """Where its memory begins; 0 while it has none."""
        return self._bytes.untyped_storage().data_ptr()

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D window of `numel` elements; readable while the slot is taken."""
        window = torch.empty(0, dtype=dtype, device=self._bytes.device)
        storage = self._bytes.untyped_storage()
        return window.set_(storage, offset_bytes // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]  # torch's stub lacks untyped storages

    def take(self, owner: str) -> None:
        """Hold `owner`'s parameters from now on."""
        if not self.resident:
            self._bytes.untyped_storage().resize_(self.nbytes)
        self.owner = owner
        self.content = None

    def give_back(self) -> None:
        """Nobody reads it any more; what was read so far was read on the current stream."""
        self.owner = None
        if not self.resident:
            self.content = None
            self._bytes.untyped_storage().resize_(0)
