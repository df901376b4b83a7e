"""Where the launchers of a run meet: a store that listens on one address alone.

Note: torch's own ways listen on all interfaces, and c10d's unpickles what it finds in the store.
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
    """A store's server that listens on `address` alone, and its port; 0: one that is free.

    Raises:
        UsageError: the address is another machine's, or the port is in use.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
    except OSError as error:
        listening.close()
        raise UsageError(
            f"launch.rdzv_endpoint={address}:{port}: node 0 cannot listen there: {error.strerror}"
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
    """Launchers that know each other already; one alone has a store of its own each time."""

    def __init__(
        self,
        place: tuple[int, int] = (0, 1),
        store: Store | None = None,
        where: tuple[str, int] | None = None,
    ) -> None:
        """The first launcher alone; or which of how many, with their store and its address."""
        self._place, self._store = place, store
        self._where = None if where is None else RendezvousStoreInfo(*where)

    def get_backend(self) -> str:
        """Its name."""
        return "fsdpctl"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the launchers' store, so that none of them opens a port for another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Who this is among the launchers, and where all workers meet."""
        store, where = self._store, self._where
        if store is None or where is None:
            store, port = bound_store(LOOPBACK)
            where = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(PrefixStore("launchers", store), *self._place, where)

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """There is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        """None: all were there when it began."""
        return 0

    def get_run_id(self) -> str:
        """Nobody else meets here."""
        return "fsdpctl"

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True
