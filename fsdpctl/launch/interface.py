"""By which interface of this machine others are reached."""

import socket

import psutil

from fsdpctl.errors import UsageError

LOOPBACK = "127.0.0.1"


def loopback_interface() -> str | None:
    """What this system calls the one that only this machine reaches; None where it has none."""
    return _interface_of(LOOPBACK)


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return name
    return None


def split_endpoint(endpoint: str, *, for_others: bool) -> tuple[str, int]:
    """The IPv4 address and the port of `host:port`; with `for_others` one that they reach too.

    Raises:
        UsageError: it is none, or nobody knows the host.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"launch.rdzv_endpoint={endpoint}: is HOST:PORT of node 0, as 10.0.0.1:29500"
        )
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(f"launch.rdzv_endpoint={endpoint}: {host}: {error.strerror}") from None
    is_own_name = address.startswith("127.") and host not in (address, "localhost")
    if for_others and is_own_name:
        address = _reachable(endpoint) or address
    return address, int(port)


def _reachable(endpoint: str) -> str | None:
    """This machine's address in the network, for one that has its own name at 127.0.1.1, as Debian.

    None where it has none, and so is alone.

    Raises:
        UsageError: it has several.
    """
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    if len(found) > 1:
        raise UsageError(
            f"launch.rdzv_endpoint={endpoint}: here that name means this machine to itself; "
            f"give the address that others reach: {', '.join(sorted(found))}"
        )
    return next(iter(found), None)


def own_address(towards: str, interface: str | None) -> tuple[str, str]:
    """This machine's address as others see it, and the interface that has it.

    Args:
        towards: an address that the others reach; no packet is sent.
        interface: the one to take; None: the one that the system would.

    Raises:
        UsageError: there is no such interface, or no way there.
    """
    if interface is not None:
        of_name = psutil.net_if_addrs()
        found = [e.address for e in of_name.get(interface, ()) if e.family == socket.AF_INET]
        if not found:
            raise UsageError(
                f"launch.interface={interface}: has no IPv4 address here; there are "
                f"{', '.join(sorted(of_name))}"
            )
        return found[0], interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError as error:
            raise UsageError(
                f"launch.rdzv_endpoint: no way to {towards} from here: {error.strerror}"
            ) from None
        address = str(probe.getsockname()[0])
    name = _interface_of(address)
    if name is None:
        raise UsageError(f"launch.rdzv_endpoint: {address} is on no interface of this machine")
    return address, name
