"""The network interface and address by which other nodes reach this one."""

import socket

import psutil

from fsdpctl.errors import UsageError

LOOPBACK = "127.0.0.1"


def _addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface."""
    return {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, or None."""
    return next((name for name, found in _addresses().items() if address in found), None)


def split_endpoint(endpoint: str, *, for_others: bool) -> tuple[str, int]:
    """Return the IPv4 address and the port of `host:port`, which other nodes reach if `for_others`.

    Raises:
        UsageError: If it is not of that form, or the host is unknown.
    """
    where = f"launch.rdzv_endpoint={endpoint}"
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{where}: expected HOST:PORT of node 0, such as 10.0.0.1:29500")
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(f"{where}: {host}: {error.strerror}") from None
    if for_others and address.startswith("127.") and host not in (address, "localhost"):
        # Debian, for example, maps a host's own name to 127.0.1.1.
        found = [e for each in _addresses().values() for e in each if not e.startswith("127.")]
        if len(found) > 1:
            raise UsageError(
                f"{where}: {host} is a loopback address on this machine; expected an address that "
                f"other nodes reach: {', '.join(sorted(found))}"
            )
        address = next(iter(found), address)
    return address, int(port)


def own_address(towards: str, interface: str | None) -> tuple[str, str]:
    """Return this machine's address as another node sees it, and its interface.

    No packet is sent. `interface`: the one to use; None: the system's default.

    Raises:
        UsageError: If there is no such interface, or no route.
    """
    if interface is not None:
        addresses = _addresses()
        if not addresses.get(interface):
            raise UsageError(
                f"launch.interface={interface}: no IPv4 address found; expected one of "
                f"{', '.join(sorted(addresses))}"
            )
        return addresses[interface][0], interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError as error:
            raise UsageError(
                f"launch.rdzv_endpoint: no route to {towards}: {error.strerror}"
            ) from None
        address = str(probe.getsockname()[0])
    name = interface_of(address)
    if name is None:
        raise UsageError(f"launch.rdzv_endpoint: {address} is not on an interface of this machine")
    return address, name
