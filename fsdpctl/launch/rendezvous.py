"""Where the ranks of one machine meet: a store that listens on the loopback interface alone.

Note: torch's own ways listen on all interfaces, and c10d's unpickles what it finds in the store.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # it does
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from fsdpctl.launch.loopback import LOOPBACK

_PATIENCE = timedelta(seconds=60)


def bound_store(address: str) -> tuple[TCPStore, int]:
    """A store's server that listens on `address` alone, and its port."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((address, 0))  # a port that is free, and ours from here on
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


class LoopbackRendezvous(RendezvousHandler):
    """One machine, at once; a store of its own for every round of workers."""

    def get_backend(self) -> str:
        """Its name."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the launcher's store, so that none of them opens a port for another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round's store."""
        store, port = bound_store(LOOPBACK)
        return RendezvousInfo(
            PrefixStore("fsdpctl", store), 0, 1, RendezvousStoreInfo(LOOPBACK, port)
        )

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """There is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        """Of other machines there are none."""
        return 0

    def get_run_id(self) -> str:
        """Nobody else meets here."""
        return "fsdpctl"

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True
