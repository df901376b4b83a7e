"""Addresses and ports of the rendezvous."""

import contextlib
import re
import socket
import threading
from unittest.mock import Mock

import psutil
import pytest

from fsdpctl.errors import UsageError
from fsdpctl.launch import addresses
from fsdpctl.launch.addresses import LOOPBACK, connect_store, create_store
from tests.commands.run import fsdpctl
from tests.test_architecture import package_sources


def test_a_store_listens_on_its_address_alone():
    store, port = create_store(LOOPBACK)
    listening = {
        each.laddr.ip
        for each in psutil.Process().net_connections()
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    assert listening == {LOOPBACK}
    address = next((
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and each.address != LOOPBACK
    ), None)  # fmt: skip
    if address is not None:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=1)
    del store


def _greet(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the server is closed
        while True:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.9" * 9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "talking", "closed"])
def test_a_wrong_endpoint_is_an_error_of_one_line(kind, tmp_path):
    message = {
        "closed": "node 0 not reachable within 2 s (launch.timeout): Connection refused; start"
    }
    with socket.create_server((LOOPBACK, 0)) as server:
        endpoint = f"{LOOPBACK}:{server.getsockname()[1]}"
        if kind == "closed":
            server.close()
        elif kind == "talking":
            threading.Thread(target=_greet, args=(server,), daemon=True).start()
        node = ["launch.nnodes=2", "launch.node_rank=1", "launch.timeout=2", "launch.device=cpu"]
        result = fsdpctl("train", "-q", *node, f"launch.rdzv_endpoint={endpoint}", cwd=tmp_path)
    assert result.returncode == 2
    expected = message.get(kind, "another program listens there")
    assert result.stderr.startswith(f"fsdpctl: {endpoint}: {expected}")
    assert len(result.stderr.splitlines()) == 1


def test_node_0_may_start_later():
    store, port = create_store(LOOPBACK)
    del store
    later: list[object] = []
    timer = threading.Timer(1, lambda: later.append(create_store(LOOPBACK, port)[0]))
    timer.start()
    connect_store(LOOPBACK, port, 20).set("key", "value")
    timer.join()
    assert len(later) == 1


def test_nothing_of_the_package_unpickles():
    """The package unpickles neither messages nor files."""
    forbidden = ("pickle", "all_gather_object", "broadcast_object", "torch.load(", "eval(", "exec(")
    results = [
        (module, arg)
        for module, source in package_sources().items()
        for arg in forbidden
        if arg in re.sub(r"unpickle|\.eval\(|refuse_pickl|allow_pickle=False", "", source)
    ]
    assert results == []


@pytest.mark.parametrize("error", [OSError(98, "Address already in use"), RuntimeError("of torch")])
def test_no_free_port_is_an_error_of_one_line(error, monkeypatch):
    monkeypatch.setattr(addresses, "TCPStore", Mock(side_effect=error))
    with pytest.raises(UsageError, match=r"127.0.0.1: no free port \(net.ipv4.ip_local_port_range"):
        addresses.create_store("127.0.0.1")
    with pytest.raises(UsageError, match="rdzv_endpoint=127.0.0.1:29999: node 0 cannot listen"):
        addresses.create_store("127.0.0.1", 29999)
