"""The interface that only this machine reaches."""

import socket

import psutil

LOOPBACK = "127.0.0.1"


def loopback_interface() -> str | None:
    """What this system calls it; None where it has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == LOOPBACK for each in addresses):
            return name
    return None
