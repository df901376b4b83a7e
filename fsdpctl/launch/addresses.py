"""Network addresses, and the launchers' stores, which listen on one address and have a time limit.

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
_BACKOFF_SECONDS = 4.0  # between the last attempts of torch's client


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface, with its link-local addresses last."""
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
    interfaces = _addresses().items()
    return next((name for name, addresses in interfaces if address in addresses), None)


def loopback() -> str:
    """Return the loopback address of IPv4, or of IPv6 if this machine has no IPv4."""
    return LOOPBACK if interface_of(LOOPBACK) or not interface_of("::1") else "::1"


def resolve_endpoint(endpoint: str, *, for_others: bool) -> tuple[str, int]:
    """Return the address and the port of `host:port`; other nodes reach it if `for_others`.

    If a name has addresses of both families, return the IPv4 address, unless this machine has only
    IPv6. UsageError if `endpoint` does not have this form, or the host is unknown.
    """
    location = f"launch.rdzv_endpoint={endpoint}"
    host, port = host_and_port(endpoint)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        resolved = [_format_address(info[4]) for info in infos]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{location}: {host}: {getattr(error, 'strerror', error)}") from None
    all_addresses = (ip_address(x) for addresses in _addresses().values() for x in addresses)
    local = [str(each) for each in all_addresses if not (each.is_loopback or each.is_link_local)]
    only_ipv6 = bool(local) and all(map(_is_ipv6, local))
    address = min(resolved, key=lambda each: _is_ipv6(each) != only_ipv6)
    if for_others and ip_address(address).is_loopback and host not in (address, "localhost"):
        # Debian, for example, maps a host's own name to 127.0.1.1.
        local = [each for each in local if _is_ipv6(each) == _is_ipv6(address)] or local
        if len(local) > 1:
            expected = f"expected an address that other nodes reach: {', '.join(sorted(local))}"
            raise UsageError(
                f"{location}: {host} is a loopback address of this machine; {expected}"
            )
        address = next(iter(local), address)
    return address, port


def _socket_address(address: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4]


def _format_address(info: tuple[Any, ...]) -> str:
    """Return an address of the socket module as text, with its zone, such as fe80::1%eth0."""
    address, scope = str(info[0]).partition("%")[0], info[3] if len(info) > 3 else 0
    return f"{address}%{socket.if_indextoname(scope)}" if scope else address


def local_address(towards: str, interface: str | None) -> tuple[str, str]:
    """Return this machine's address as another node sees it, and the interface's name.

    No packet is sent. Without `interface`, the system's route decides. UsageError if the interface
    does not exist, or there is no route.
    """
    if interface is not None:
        family = _is_ipv6(towards)
        addresses = {
            name: [each for each in of_interface if _is_ipv6(each) == family]
            for name, of_interface in _addresses().items()
        }
        if not addresses.get(interface):
            interfaces = ", ".join(sorted(filter(addresses.get, addresses)))
            raise UsageError(
                f"launch.interface={interface}: no {'IPv6' if family else 'IPv4'} address found; "
                f"expected one of {interfaces}"
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
    """Start a store's server on `address` only; return it with its port. Port 0: any free port."""
    location = f"launch.rdzv_endpoint={endpoint_of(address, port)}: node 0 cannot listen"
    if not port:
        location = f"{address}: no free port (net.ipv4.ip_local_port_range)"
    listening = socket.socket(_FAMILIES[_is_ipv6(address)], socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(_socket_address(address, port))
        listening.listen()
        port = int(listening.getsockname()[1])
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        with silenced_stderr():
            file = listening.detach()
            store = TCPStore(
                address, port, timeout=_STORE_TIMEOUT, master_listen_fd=file, **options
            )
    except (OSError, RuntimeError) as error:  # RuntimeError: no port for torch's own client
        listening.close()
        raise UsageError(f"{location}: {getattr(error, 'strerror', 'cannot connect')}") from None
    return store, port


def open_store(address: str, port: int, patience: float, *, hosts_store: bool) -> TCPStore:
    """Return the store at an address, as its server or as a client; UsageError if unreachable."""
    return create_store(address, port)[0] if hosts_store else connect_store(address, port, patience)


def connect_store(address: str, port: int, patience: float) -> TCPStore:
    """Return a client of the store at an address, as soon as its server listens.

    torch's own client prints a C++ stack if nothing listens, and it waits forever for a server that
    accepts connections and does not answer. UsageError if no store answers in time.
    """
    location, deadline = endpoint_of(address, port), time.monotonic() + patience
    limit = f"within {patience:g} s (launch.timeout)"
    while cause := _connection_error(
        address, port, max(_RETRY_SECONDS, deadline - time.monotonic())
    ):
        if time.monotonic() + _RETRY_SECONDS > deadline:
            problem = f"{cause}; start the command with launch.node_rank=0 on that host"
            raise UsageError(f"{location}: node 0 not reachable {limit}: {problem}")
        time.sleep(_RETRY_SECONDS)
    # If another program answers, torch prints a C++ stack for each attempt until its own timeout. A
    # call that returned while the process exits would abort it: its timeout is short.
    seconds = min(max(_RETRY_SECONDS, deadline - time.monotonic()), _ANSWER_SECONDS)
    client = Future[TCPStore]()

    def connect() -> None:
        try:
            limit = timedelta(seconds=seconds)
            client.set_result(TCPStore(address, port, is_master=False, timeout=limit))
        except RuntimeError as error:
            client.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        with silenced_stderr():
            store = client.result(seconds + _BACKOFF_SECONDS)
        store.set_timeout(timedelta(seconds=patience + 2 * _ANSWER_SECONDS))
        return store
    except (TimeoutError, RuntimeError):
        raise UsageError(
            f"{location}: another program listens there, which does not answer as node 0; "
            "set launch.rdzv_endpoint to HOST:PORT of node 0, with a port that is free there"
        ) from None


def _connection_error(address: str, port: int, seconds: float) -> str:
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or "timed out"
    return ""
