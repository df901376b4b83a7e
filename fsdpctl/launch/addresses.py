"""Network addresses, and stores of the launchers: on a single address, with a time limit.

Note: torch's own rendezvous listens on all interfaces, and its c10d backend unpickles the store's
contents.
"""

import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil

from fsdpctl.comm.world import TCPStore
from fsdpctl.errors import UsageError
from fsdpctl.io.files import silenced_stderr
from fsdpctl.resolve.launchers import endpoint_of, host_and_port

LOOPBACK = "127.0.0.1"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_STORE_TIMEOUT = timedelta(seconds=60)
_RETRY_SECONDS = 0.5  # seconds
_ANSWER_SECONDS = 30.0  # a server that runs answers at once
_BACKOFF_SECONDS = 4.0  # between the last trials of torch's client


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface; those that only its own link knows are last."""
    return {
        name: sorted(
            (each.address for each in addresses if each.family in _FAMILIES),
            key=lambda address: ip_address(address).is_link_local,
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def _is_ipv6(address: str) -> bool:
    return ":" in address


def interface_of(address: str) -> str | None:
    return next((name for name, found in _addresses().items() if address in found), None)


def loopback() -> str:
    """Return the loopback address: that of IPv6 only if this machine has no other."""
    return LOOPBACK if interface_of(LOOPBACK) or not interface_of("::1") else "::1"


def resolve_endpoint(endpoint: str, *, for_others: bool) -> tuple[str, int]:
    """Return the address and the port of `host:port`, which other nodes reach if `for_others`.

    Of a name with addresses of both families, it is that of IPv4, unless this machine has none.
    UsageError if it is not of that form, or the host is unknown.
    """
    where = f"launch.rdzv_endpoint={endpoint}"
    host, port = host_and_port(endpoint)
    try:
        found = [
            _format_address(each[4])
            for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{where}: {host}: {getattr(error, 'strerror', error)}") from None
    every = (ip_address(address) for each in _addresses().values() for address in each)
    own = [str(each) for each in every if not (each.is_loopback or each.is_link_local)]
    only_6 = bool(own) and all(map(_is_ipv6, own))
    address = min(found, key=lambda each: _is_ipv6(each) != only_6)
    if for_others and ip_address(address).is_loopback and host not in (address, "localhost"):
        # Debian, for example, maps a host's own name to 127.0.1.1.
        own = [each for each in own if _is_ipv6(each) == _is_ipv6(address)] or own
        if len(own) > 1:
            way = f"expected an address that other nodes reach: {', '.join(sorted(own))}"
            raise UsageError(f"{where}: {host} is a loopback address on this machine; {way}")
        address = next(iter(own), address)
    return address, port


def _socket_address(address: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4]


def _format_address(place: tuple[Any, ...]) -> str:
    """Return an address of the socket module, with its zone: fe80::1%eth0."""
    address, scope = str(place[0]).partition("%")[0], place[3] if len(place) > 3 else 0
    return f"{address}%{socket.if_indextoname(scope)}" if scope else address


def local_address(towards: str, interface: str | None) -> tuple[str, str]:
    """Return this machine's address as another node sees it, and its interface.

    No packet is sent. `interface`: the one to use; None: the system's default. UsageError if there
    is no such interface, or no route.
    """
    if interface is not None:
        family = _is_ipv6(towards)
        addresses = {
            name: [each for each in of_interface if _is_ipv6(each) == family]
            for name, of_interface in _addresses().items()
        }
        if not addresses.get(interface):
            known = ", ".join(sorted(filter(addresses.get, addresses)))
            raise UsageError(
                f"launch.interface={interface}: no {'IPv6' if family else 'IPv4'} address found; "
                f"expected one of {known}"
            )
        return addresses[interface][0], interface
    with socket.socket(_FAMILIES[_is_ipv6(towards)], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_socket_address(towards, 9))
        except OSError as error:
            problem = f"no route to {towards}: {error.strerror}"
            raise UsageError(f"launch.rdzv_endpoint: {problem}") from None
        address = _format_address(probe.getsockname())
    name = interface_of(address)
    if name is None:
        raise UsageError(f"launch.rdzv_endpoint: {address} is not on an interface of this machine")
    return address, name


def create_store(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """Start a store's server on `address` only, and return it with its port; 0: a free port."""
    where = f"launch.rdzv_endpoint={endpoint_of(address, port)}: node 0 cannot listen"
    if not port:
        where = f"{address}: no free port (net.ipv4.ip_local_port_range)"
    listening = socket.socket(_FAMILIES[_is_ipv6(address)], socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(_socket_address(address, port))
        listening.listen()
        port = int(listening.getsockname()[1])
        about: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        with silenced_stderr():
            file = listening.detach()
            store = TCPStore(address, port, timeout=_STORE_TIMEOUT, master_listen_fd=file, **about)
    except (OSError, RuntimeError) as error:  # torch's, if it has no port to connect from
        listening.close()
        raise UsageError(f"{where}: {getattr(error, 'strerror', 'cannot connect')}") from None
    return store, port


def open_store(address: str, port: int, patience: float, *, is_first: bool) -> TCPStore:
    """Return the store at an address, as its server or as a client; UsageError if out of reach."""
    return create_store(address, port)[0] if is_first else connect_store(address, port, patience)


def connect_store(address: str, port: int, patience: float) -> TCPStore:
    """Return a client of the store at an address, once there is one.

    Torch's own client prints a C++ stack if nothing listens, and it waits without end for a server
    that accepts connections and does not answer. UsageError if no store answers in time.
    """
    where, deadline = endpoint_of(address, port), time.monotonic() + patience
    limit = f"within {patience:g} s (launch.timeout)"
    while cause := _connection_error(
        address, port, max(_RETRY_SECONDS, deadline - time.monotonic())
    ):
        if time.monotonic() + _RETRY_SECONDS > deadline:
            problem = f"{cause}; start the command with launch.node_rank=0 on that host"
            raise UsageError(f"{where}: node 0 not reachable {limit}: {problem}")
        time.sleep(_RETRY_SECONDS)
    # Torch prints a C++ stack for each answer that is not a store's, until its own timeout. A call
    # that is left behind must not end while the process exits, which would abort.
    most = min(max(_RETRY_SECONDS, deadline - time.monotonic()), _ANSWER_SECONDS)
    found = Future[TCPStore]()

    def connect() -> None:
        try:
            limit = timedelta(seconds=most)
            found.set_result(TCPStore(address, port, is_master=False, timeout=limit))
        except RuntimeError as error:
            found.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        with silenced_stderr():
            store = found.result(most + _BACKOFF_SECONDS)
        store.set_timeout(timedelta(seconds=patience + 2 * _ANSWER_SECONDS))
        return store
    except (TimeoutError, RuntimeError):
        raise UsageError(
            f"{where}: another program listens there, which does not answer as node 0; "
            "set launch.rdzv_endpoint to HOST:PORT of node 0, with a port that is free there"
        ) from None


def _connection_error(address: str, port: int, seconds: float) -> str:
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or "timed out"
    return ""
