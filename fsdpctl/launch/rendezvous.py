"""The store in which the launchers of a run meet, which listens on a single address.

Note: torch's own rendezvous listens on all interfaces, and its c10d backend unpickles the store's
contents.
"""

import socket
from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from fsdpctl.comm.world import PrefixStore, Store, TCPStore
from fsdpctl.errors import UsageError
from fsdpctl.launch.interface import LOOPBACK

_PATIENCE = timedelta(seconds=60)


def bound_store(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """Start a store's server on `address` only, and return it with its port; 0: a free port.

    Raises:
        UsageError: If the address is not this machine's, or the port is in use.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
    except OSError as error:
        listening.close()
        raise UsageError(
            f"launch.rdzv_endpoint={address}:{port}: node 0 cannot listen: {error.strerror}"
        ) from None
    listening.listen()
    port = int(listening.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


class Rendezvous(RendezvousHandler):
    """The rendezvous of launchers that have met; a single one has a new store each time."""

    def __init__(
        self,
        place: tuple[int, int] = (0, 1),
        store: Store | None = None,
        where: tuple[str, int] | None = None,
    ) -> None:
        """Describe the launchers: this one's number and their count; their store and its address.

        Without arguments, there is a single launcher.
        """
        self._place, self._store = place, store
        self._where = None if where is None else RendezvousStoreInfo(*where)

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "fsdpctl"

    @property
    def use_agent_store(self) -> bool:
        """True: workers use the launchers' store, so that none of them opens a port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this launcher's number and the store of all workers."""
        store, where = self._store, self._where
        if store is None or where is None:
            store, port = bound_store(LOOPBACK)
            where = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(PrefixStore("launchers", store), *self._place, where)

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other launcher can join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: all launchers have joined."""
        return 0

    def get_run_id(self) -> str:
        """Return a constant: the store has no other run."""
        return "fsdpctl"

    def shutdown(self) -> bool:
        """Return True: there is nothing to close."""
        return True
