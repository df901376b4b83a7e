"""Several hosts on one machine: network namespaces with addresses, connected by a bridge."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands.run import environment


class Hosts:
    """Hosts that see only the network between them; they share files, as on a cluster."""

    def __init__(self, names: list[str], addresses: list[str], links: list[str]) -> None:
        self.names, self.addresses, self._links = names, addresses, links

    def sent(self, host: int) -> int:
        """Return the bytes that a host has sent so far."""
        return int(Path(f"/sys/class/net/{self._links[host]}/statistics/rx_bytes").read_text())

    def plug(self, host: int, *, is_in: bool) -> None:
        """Plug or unplug a host's cable."""
        _ip("link", "set", self._links[host], "up" if is_in else "down")

    def start(
        self, host: int, *args: str, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `fsdpctl` on a host, with standard output and error in one pipe."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "fsdpctl", *args],
            cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=env or environment(),
        )  # fmt: skip


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make hosts; skip the test if this machine does not permit it."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("hosts are network namespaces: they need root and iproute2")
    tag = os.getpid() % 10000
    bridge, names = f"fsb{tag}", [f"fsdpctl-{tag}-{host}" for host in range(count)]
    addresses = [f"10.{78 + tag % 100}.{tag // 100}.{host + 1}" for host in range(count)]
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("link", "set", bridge, "up")
            for host, (name, address) in enumerate(zip(names, addresses, strict=True)):
                there, link = ["-n", name], f"fsv{tag}-{host}"
                _ip("netns", "add", name)
                _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("link", "set", link, "master", bridge, "up")
                _ip(*there, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip(*there, "link", "set", "eth0", "up")
                _ip(*there, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no hosts can be made here: {error.stderr.strip()}")
        yield Hosts(names, addresses, [f"fsv{tag}-{host}" for host in range(count)])
    finally:
        # Deleting a namespace deletes its links some time later: delete them at once.
        for host in range(count):
            args = ["ip", "link", "del", f"fsv{tag}-{host}"]
            subprocess.run(args, capture_output=True, check=False)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
