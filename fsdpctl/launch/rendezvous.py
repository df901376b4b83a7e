"""Network addresses, and stores of the launchers: on a single address, with a time limit.

Note: torch's own rendezvous listens on all interfaces, and its c10d backend unpickles the store's
contents. Its timeouts do not hold on a dead link: if a host disappears without closing its
connections, each call blocks for a quarter of an hour, until the kernel gives up the connection.
"""

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

import psutil
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from fsdpctl.comm.world import PrefixStore, Store, TCPStore
from fsdpctl.errors import UsageError
from fsdpctl.resolve.launchers import endpoint_of, host_and_port

LOOPBACK = "127.0.0.1"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_PATIENCE = timedelta(seconds=60)
T = TypeVar("T")
MOMENT = 0.5  # seconds


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface; those that only its own link knows are last."""
    return {
        name: sorted(
            (each.address for each in addresses if each.family in _FAMILIES),
            key=lambda address: ip_address(address).is_link_local,
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def _is_6(address: str) -> bool:
    return ":" in address


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, or None."""
    return next((name for name, found in _addresses().items() if address in found), None)


def loopback() -> str:
    """Return the loopback address: that of IPv6 only if this machine has no other."""
    return LOOPBACK if interface_of(LOOPBACK) or not interface_of("::1") else "::1"


def split_endpoint(endpoint: str, *, for_others: bool) -> tuple[str, int]:
    """Return the address and the port of `host:port`, which other nodes reach if `for_others`.

    Of a name with addresses of both families, it is that of IPv4, unless this machine has none.

    Raises:
        UsageError: If it is not of that form, or the host is unknown.
    """
    where = f"launch.rdzv_endpoint={endpoint}"
    host, port = host_and_port(endpoint)
    try:
        found = [_text(each[4]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{where}: {host}: {getattr(error, 'strerror', error)}") from None
    every = (ip_address(address) for each in _addresses().values() for address in each)
    own = [str(each) for each in every if not (each.is_loopback or each.is_link_local)]
    only_6 = bool(own) and all(map(_is_6, own))
    address = min(found, key=lambda each: _is_6(each) != only_6)
    if for_others and ip_address(address).is_loopback and host not in (address, "localhost"):
        # Debian, for example, maps a host's own name to 127.0.1.1.
        own = [each for each in own if _is_6(each) == _is_6(address)] or own
        if len(own) > 1:
            raise UsageError(
                f"{where}: {host} is a loopback address on this machine; expected an address that "
                f"other nodes reach: {', '.join(sorted(own))}"
            )
        address = next(iter(own), address)
    return address, port


def _place(address: str, port: int) -> tuple[Any, ...]:
    """Return an address as the socket module expects it, which drops the zone of a text."""
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4]


def _text(place: tuple[Any, ...]) -> str:
    """Return an address of the socket module, with its zone: fe80::1%eth0."""
    address, scope = str(place[0]).partition("%")[0], place[3] if len(place) > 3 else 0
    return f"{address}%{socket.if_indextoname(scope)}" if scope else address


def own_address(towards: str, interface: str | None) -> tuple[str, str]:
    """Return this machine's address as another node sees it, and its interface.

    No packet is sent. `interface`: the one to use; None: the system's default.

    Raises:
        UsageError: If there is no such interface, or no route.
    """
    if interface is not None:
        addresses = {
            name: [each for each in found if _is_6(each) == _is_6(towards)]
            for name, found in _addresses().items()
        }
        if not addresses.get(interface):
            raise UsageError(
                f"launch.interface={interface}: no {'IPv6' if _is_6(towards) else 'IPv4'} address "
                f"found; expected one of {', '.join(sorted(filter(addresses.get, addresses)))}"
            )
        return addresses[interface][0], interface
    with socket.socket(_FAMILIES[_is_6(towards)], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_place(towards, 9))
        except OSError as error:
            raise UsageError(
                f"launch.rdzv_endpoint: no route to {towards}: {error.strerror}"
            ) from None
        address = _text(probe.getsockname())
    name = interface_of(address)
    if name is None:
        raise UsageError(f"launch.rdzv_endpoint: {address} is not on an interface of this machine")
    return address, name


def bound_store(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """Start a store's server on `address` only, and return it with its port; 0: a free port."""
    listening = socket.socket(_FAMILIES[_is_6(address)], socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(_place(address, port))
    except OSError as error:
        listening.close()
        where = f"launch.rdzv_endpoint={endpoint_of(address, port)}"
        raise UsageError(f"{where}: node 0 cannot listen: {error.strerror}") from None
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
            store, port = bound_store(loopback())
            where = RendezvousStoreInfo(loopback(), port)
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


class StoreLostError(RuntimeError):
    """The store did not answer in time, and is not used again."""


class TimeoutStore:
    """A store whose calls run in threads of their own; for one caller at a time."""

    def __init__(self, store: Store, seconds: float) -> None:
        """Wrap `store`, which has no other user; a call takes at most `seconds`."""
        self._store, self._seconds = store, seconds
        self._is_lost = False

    def set(self, key: str, value: str) -> None:
        """Call torch's `set`; StoreLostError, as in all methods, if the store is late."""
        self._call(lambda: self._store.set(key, value), self._seconds)

    def get(self, key: str) -> bytes:
        """Call torch's `get`."""
        return self._call(lambda: self._store.get(key), self._seconds)

    def check(self, keys: list[str]) -> bool:
        """Call torch's `check`."""
        return self._call(lambda: self._store.check(keys), self._seconds)

    def wait(self, keys: list[str], most: timedelta) -> None:
        """Call torch's `wait`, which takes at most `most`."""
        self._call(lambda: self._store.wait(keys, most), most.total_seconds() + 1)

    def _call(self, call: Callable[[], T], seconds: float) -> T:
        if not self._is_lost:
            with suppress(TimeoutError):
                return within(seconds, call)
        self._is_lost = True
        raise StoreLostError("the store of the nodes does not answer")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call; after `seconds`, TimeoutError, and its thread continues."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    found: T = answer
    return found


class KeyWatcher:
    """A thread that checks whether a key exists, so that the caller never blocks."""

    def __init__(self, store: Store, *, default: bool) -> None:
        """Check in `store`, which has no other user; return `default` if that fails."""
        self._store, self._default = store, default
        self._found: dict[str, bool] = {}
        self._checking: threading.Thread | None = None

    def has(self, key: str) -> bool:
        """Return whether the key is known to exist; wait a moment for the first answer."""
        if not self._found.get(key) and (self._checking is None or not self._checking.is_alive()):
            self._checking = threading.Thread(target=self._check, args=(key,), daemon=True)
            self._checking.start()
            self._checking.join(MOMENT)
        return self._found.get(key, False)

    def _check(self, key: str) -> None:
        try:
            self._found[key] = self._store.check([key])
        except RuntimeError:
            self._found[key] = self._default
