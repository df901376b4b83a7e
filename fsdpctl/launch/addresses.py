"""Network addresses, and the launchers' stores, which listen on one address and have a time limit.

Note: torch's own rendezvous listens on all interfaces, and its c10d backend unpickles messages.
"""

import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from ipaddress import ip_address
from itertools import chain
from typing import Any

import psutil

from fsdpctl.comm.world import TCPStore
from fsdpctl.errors import UsageError
from fsdpctl.io.files import silenced_stderr
from fsdpctl.resolve.launchers import endpoint_of, host_and_port

LOOPBACK = "127.0.0.1"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)  # indexed by _is_ipv6()
_STORE_TIMEOUT = timedelta(seconds=60)
_RETRY_SECONDS = 0.5
_ANSWER_SECONDS = 30.0  # limit for the first answer; a healthy server needs milliseconds
_BACKOFF_SECONDS = 4.0  # time by which torch's client may exceed its timeout
_ANY_PORT = 9  # connect() of a UDP socket sends nothing


def _addresses_by_interface() -> dict[str, list[str]]:
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
    interfaces = _addresses_by_interface().items()
    return next((name for name, addresses in interfaces if address in addresses), None)


def loopback() -> str:
    """Return the loopback address of IPv4, or of IPv6 if this machine has no IPv4."""
    return LOOPBACK if interface_of(LOOPBACK) or not interface_of("::1") else "::1"


def resolve_endpoint(endpoint: str, *, for_others: bool) -> tuple[str, int]:
    """Resolve `host:port`; if `for_others`, to an address that other nodes can reach.

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
    ips = (ip_address(each) for each in chain.from_iterable(_addresses_by_interface().values()))
    reachable = [str(ip) for ip in ips if not (ip.is_loopback or ip.is_link_local)]
    only_ipv6 = bool(reachable) and all(map(_is_ipv6, reachable))
    # False sorts first: the family that this machine has.
    address = min(resolved, key=lambda each: _is_ipv6(each) != only_ipv6)
    if for_others and ip_address(address).is_loopback and host not in (address, "localhost"):
        # Debian, for example, maps a host's own name to 127.0.1.1.
        family = [each for each in reachable if _is_ipv6(each) == _is_ipv6(address)]
        choices = family or reachable
        if len(choices) > 1:
            expected = f"expected an address that other nodes reach: {', '.join(sorted(choices))}"
            raise UsageError(f"{location}: {host} resolves to a loopback address; {expected}")
        address = choices[0] if choices else address
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
        is_ipv6 = _is_ipv6(towards)
        candidates = {
            name: [each for each in addresses if _is_ipv6(each) == is_ipv6]
            for name, addresses in _addresses_by_interface().items()
        }
        if not candidates.get(interface):
            interfaces = ", ".join(sorted(filter(candidates.get, candidates)))
            raise UsageError(
                f"launch.interface={interface}: no {'IPv6' if is_ipv6 else 'IPv4'} address found; "
                f"expected one of {interfaces}"
            )
        return candidates[interface][0], interface
    with socket.socket(_FAMILIES[_is_ipv6(towards)], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_socket_address(towards, _ANY_PORT))
        except OSError as error:
            problem = f"launch.rdzv_endpoint: no route to {towards}: {error.strerror}"
            raise UsageError(problem) from None
        address = _format_address(probe.getsockname())
    name = interface_of(address)
    if name is None:
        raise UsageError(f"launch.rdzv_endpoint: {address} is not on an interface of this machine")
    return address, name


def create_store(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """Start a store's server on `address` only; return it with its port. Port 0: any free port."""
    problem = f"launch.rdzv_endpoint={endpoint_of(address, port)}: node 0 cannot listen"
    if not port:
        problem = f"{address}: no free port (net.ipv4.ip_local_port_range)"
    listening = socket.socket(_FAMILIES[_is_ipv6(address)], socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(_socket_address(address, port))
        listening.listen()
        port = int(listening.getsockname()[1])
        with silenced_stderr():
            store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT,
                master_listen_fd=listening.detach(),  # TCPStore owns and closes it
            )  # fmt: skip
    except (OSError, RuntimeError) as error:  # RuntimeError: TCPStore's client found no free port
        listening.close()
        raise UsageError(f"{problem}: {getattr(error, 'strerror', 'cannot connect')}") from None
    return store, port


def open_store(address: str, port: int, timeout: float, *, hosts_store: bool) -> TCPStore:
    """Return the store at an address, as its server or as a client; UsageError if unreachable."""
    return create_store(address, port)[0] if hosts_store else connect_store(address, port, timeout)


def connect_store(address: str, port: int, timeout: float) -> TCPStore:
    """Return a client of the store at an address, as soon as its server listens.

    torch's own client prints a C++ stack if nothing listens, and it waits forever for a server that
    accepts connections and does not answer. UsageError if no store answers in time.
    """
    location, deadline = endpoint_of(address, port), time.monotonic() + timeout
    limit = f"within {timeout:g} s (launch.timeout)"
    while cause := _connection_error(address, port, deadline):
        if time.monotonic() + _RETRY_SECONDS > deadline:
            problem = f"{cause}; start the command with launch.node_rank=0 on that host"
            raise UsageError(f"{location}: node 0 not reachable {limit}: {problem}")
        time.sleep(_RETRY_SECONDS)
    # If another program answers, torch prints a C++ stack for each attempt until its own timeout. A
    # TCPStore() that returns during interpreter exit aborts the process, so `seconds` is short.
    seconds = min(max(_RETRY_SECONDS, deadline - time.monotonic()), _ANSWER_SECONDS)
    client = Future[TCPStore]()

    def connect() -> None:
        try:
            client_timeout = timedelta(seconds=seconds)
            client.set_result(TCPStore(address, port, is_master=False, timeout=client_timeout))
        except RuntimeError as error:
            client.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        with silenced_stderr():
            store = client.result(seconds + _BACKOFF_SECONDS)
        # Blocking calls wait for ranks that may start `timeout` seconds later.
        store.set_timeout(timedelta(seconds=timeout + 2 * _ANSWER_SECONDS))
        return store
    except (TimeoutError, RuntimeError):
        raise UsageError(
            f"{location}: another program listens there, which does not answer as node 0; "
            "set launch.rdzv_endpoint to HOST:PORT of node 0, with a port that is free there"
        ) from None


def _connection_error(address: str, port: int, deadline: float) -> str:
    """Return why a connection fails, or an empty string."""
    seconds = max(_RETRY_SECONDS, deadline - time.monotonic())
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or "timed out"
    return ""
