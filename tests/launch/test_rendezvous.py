"""Where ranks meet."""

import re
import socket

import psutil
import pytest

from fsdpctl.launch.rendezvous import LOOPBACK, Rendezvous, bound_store
from tests.test_architecture import package_sources


def test_a_store_listens_on_its_address_alone():
    store, port = bound_store(LOOPBACK)
    listening = {
        each.laddr.ip
        for each in psutil.Process().net_connections()
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    assert listening == {LOOPBACK}
    own = next(
        (
            each.address
            for addresses in psutil.net_if_addrs().values()
            for each in addresses
            if each.family == socket.AF_INET and each.address != LOOPBACK
        ),
        None,
    )
    if own is not None:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((own, port), timeout=1)
    del store


def test_every_round_has_its_own_store():
    rendezvous = Rendezvous()
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    first.store.set("key", "old")
    assert not second.store.check(["key"])
    assert first.bootstrap_store_info != second.bootstrap_store_info
    assert (first.rank, first.world_size) == (0, 1)


def test_nothing_of_the_package_unpickles():
    """Neither messages nor files are unpickled."""
    words = ("pickle", "all_gather_object", "broadcast_object", "torch.load(", "eval(", "exec(")
    found = [
        (module, word)
        for module, source in package_sources().items()
        for word in words
        if word in re.sub(r"unpickle|\.eval\(|refuse_pickl|allow_pickle=False", "", source)
    ]
    assert found == []
