"""torch's key-value stores, in which processes meet; torch does not say that it exports them."""

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

__all__ = ["DistStoreError", "PrefixStore", "Store", "TCPStore"]
