"""Where the launchers of a run meet: a store that listens on one address alone.

Note: torch's own ways listen on all interfaces, and c10d's unpickles what it finds in the store.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # it does
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

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
    """Launchers that know each other already; alone, each round has a store of its own."""

    def __init__(
        self, store: TCPStore | None = None, port: int = 0, *, node: int = 0, nodes: int = 1
    ) -> None:
        """`store`: where several machines meet, of which this is number `node`."""
        self._store, self._port = store, port
        self._node, self._nodes = node, nodes

    def get_backend(self) -> str:
        """Its name."""
        return "fsdpctl"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the launchers' store, so that none of them opens a port for another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Who this is among the launchers, and where all workers meet."""
        store, port = self._store, self._port
        if store is None:
            store, port = bound_store(LOOPBACK)
        where = RendezvousStoreInfo(LOOPBACK if self._store is None else store.host, port)
        return RendezvousInfo(PrefixStore("fsdpctl", store), self._node, self._nodes, where)

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
