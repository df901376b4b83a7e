"""Several nodes: handshake, losses as on one node, common stops, and reports of failures."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from fsdpctl.config.launch import LaunchConfig
from fsdpctl.errors import UsageError
from fsdpctl.launch.addresses import (
    LOOPBACK,
    connect_store,
    create_store,
    interface_of,
    local_address,
    resolve_endpoint,
)
from fsdpctl.launch.handshake import Handshake, Invitation, _check_directory, describe_difference
from fsdpctl.launch.nodes import NodeLauncher, RestartRound
from fsdpctl.launch.outcome import Failure, NodeOutcome
from fsdpctl.launch.workers import _environment, launch_workers
from fsdpctl.resolve.launchers import endpoint_of
from tests.commands.run import TINY, figures, fsdpctl, make_text
from tests.commands.test_interruptions import ended, has_stepped, wait_for
from tests.launch.hosts import Hosts, hosts

# Two, three and four ranks divide this batch.
SMALL = [each.replace("batch_size=8", "batch_size=12") for each in TINY]


def free_endpoint() -> str:
    store, port = create_store(LOOPBACK)
    del store
    return f"{LOOPBACK}:{port}"


def alone(folder: Path, ranks: int, *args: str) -> list[Any]:
    """Return the figures of the same run on one machine."""
    run = folder / "one"
    typed = [*SMALL, f"data.path={make_text(folder)}", f"train.run_dir={run}", *args]
    done = fsdpctl("train", *typed, f"launch.nproc_per_node={ranks}", cwd=folder)
    assert done.returncode == 0, done.stderr
    return figures(run)


def launches(nodes: int, endpoint: str) -> list[LaunchConfig]:
    return [
        LaunchConfig(
            nproc_per_node=1, nnodes=nodes, node_rank=node, rdzv_endpoint=endpoint, timeout=20
        )
        for node in range(nodes)
    ]


def together(count: int, act: Callable[[NodeLauncher], object]) -> list[Future[object]]:
    """Call `act` on each node, of which none leaves before all have acted; return the results."""
    seen: list[NodeLauncher] = []

    def on_node(launch: LaunchConfig) -> object:
        seen.append(NodeLauncher(launch))
        return act(seen[-1])

    with ThreadPoolExecutor(count) as pool:
        results = [pool.submit(on_node, each) for each in launches(count, free_endpoint())]
    for each in sorted(seen, key=lambda nodes: -nodes.node_rank):  # the store's node leaves last
        each.leave()
    return results


def test_all_nodes_start_if_all_can(tmp_path: Path) -> None:
    def act(nodes: NodeLauncher) -> object:
        meeting = nodes.handshake
        if nodes.node_rank == 0:
            meeting.invite(tmp_path, 1)
            return str(tmp_path)
        launch = LaunchConfig(nproc_per_node=1)
        return meeting.accept(lambda plan: describe_difference(plan, launch, "node")).run_dir

    assert [each.result() for each in together(3, act)] == [str(tmp_path)] * 3
    assert not list(tmp_path.iterdir())  # the handshake file is removed


def test_no_node_starts_if_one_cannot(tmp_path: Path) -> None:
    def act(nodes: NodeLauncher) -> object:
        if nodes.node_rank == 0:
            nodes.handshake.invite(tmp_path, 2)
        launch = LaunchConfig(nproc_per_node=nodes.node_rank + 1)
        return nodes.node_rank == 0 or nodes.handshake.accept(
            lambda plan: describe_difference(plan, launch, "node")
        )

    for each in together(3, act):
        with pytest.raises(UsageError, match=r"^node 2 .*nproc_per_node=3: expected 2, as on"):
            each.result()


def test_a_different_directory_of_the_same_name_is_detected(tmp_path: Path) -> None:
    message = _check_directory(Invitation(run_dir=str(tmp_path), token="1234"), "node")
    assert "all nodes need the same directory" in message
    (tmp_path / "handshake").write_text("4321")
    assert _check_directory(Invitation(run_dir=str(tmp_path), token="1234"), "node") == message
    (tmp_path / "handshake").write_text("1234")
    assert _check_directory(Invitation(run_dir=str(tmp_path), token="1234"), "node") == ""


def test_different_programs_are_detected() -> None:
    mine = LaunchConfig(nproc_per_node=1)
    assert "on node 0" in describe_difference(Invitation(software="fsdpctl 7"), mine, "node")


def test_all_nodes_report_why_node_0_does_not_start() -> None:
    def act(nodes: NodeLauncher) -> object:
        if nodes.node_rank == 0:
            nodes.handshake.cancel("model.num_heads=5: must divide")
            return None
        return nodes.handshake.accept(lambda plan: "")

    first, second = together(2, act)
    assert first.result() is None
    with pytest.raises(UsageError, match=r"node 0: model.num_heads=5: must divide"):
        second.result()


@pytest.mark.slow
def test_all_nodes_detect_failed_and_unreachable_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpctl.launch.nodes._UNREACHABLE_SECONDS", 6.0)
    failure = Failure(2, "there", -9, "", 1)

    def act(nodes: NodeLauncher) -> object:
        if nodes.node_rank == 1:
            nodes.is_reporter = False  # as if its launcher had been killed
            return None
        result = nodes.exchange_outcomes(0, NodeOutcome((failure,) if nodes.node_rank == 2 else ()))
        failed = nodes.node_rank == 2 or nodes.has_failed_elsewhere(0)
        return result.failures, result.unreachable_nodes, failed

    first, _, third = together(3, act)
    assert first.result() == third.result() == ((failure,), {1: socket.gethostname()}, True)


@pytest.mark.slow
def test_remaining_nodes_are_renumbered_in_the_next_round() -> None:
    def act(nodes: NodeLauncher) -> object:
        if nodes.node_rank == 0:
            nodes.announce_next_round(0, RestartRound([0, 2], 1))
            return (nodes.group_rank, len(nodes.nodes))
        following = nodes.wait_for_next_round(0)
        return (nodes.group_rank, len(nodes.nodes)) if nodes.node_rank in following.nodes else None

    assert [each.result() for each in together(3, act)] == [(0, 2), None, (1, 2)]


def test_a_launcher_that_leaves_before_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpctl.launch.handshake._POLL_SECONDS", 0.05)
    store = HashStore()
    _, second, third = (Handshake(store, n, 3, noun="node", timeout=20) for n in range(3))
    second.withdraw("was stopped before it began")
    with pytest.raises(UsageError, match="node 1: was stopped"):
        third.accept(lambda plan: "")


def test_a_duplicate_node_rank_is_rejected() -> None:
    store = HashStore()
    for number in range(2):
        Handshake(store, number, 2, noun="node", timeout=20)
    with pytest.raises(UsageError, match="node 1: another node has this number"):
        Handshake(store, 1, 2, noun="node", timeout=20)


def test_node_0_rejects_an_endpoint_of_another_machine() -> None:
    with pytest.raises(UsageError, match="node 0 cannot listen"):
        create_store("192.0.2.1", 29500)


@pytest.mark.parametrize("endpoint", [
    "10.0.0.1", "10.0.0.1:x", ":29500", "10.0.0.1:70000", "10.0.0.1:0", "::1", "::1:29500",
    "fe80::1%eth0:29500", "[::1]", "[::1]:x", "[host]:1", "[]:1", "[::1]:29500:1", "[10.0.0.1]",
])  # fmt: skip
def test_an_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT of node 0"):
        resolve_endpoint(endpoint, for_others=True)


V4, V6 = ("10.0.0.1", 1), ("fd00::1", 1, 0, 0)
OWN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.9", "fd00::9", "fe80::9%eth0"]}


@pytest.mark.parametrize(("endpoint", "known", "local_addresses", "expected"), [
    ("[::1]:1", [("::1", 1, 0, 0)], OWN, "::1"), ("[fd00::1]:1", [V6], OWN, "fd00::1"),
    ("[fe80::1%lo]:1", [("fe80::1", 1, 0, 1)], OWN, "fe80::1%lo"),
    ("host:1", [V6, V4], OWN, "10.0.0.1"), ("host:1", [V6], OWN, "fd00::1"),
    ("host:1", [V4, V6], {"lo": OWN["lo"], "eth0": ["fd00::9"]}, "fd00::1"),
    ("host:1", [("127.0.1.1", 1)], OWN, "10.0.0.9"),
    ("host:1", [("::1", 1, 0, 0)], OWN, "fd00::9"),
    ("host:1", [("127.0.1.1", 1)], {"lo": ["127.0.0.1"], "eth0": ["fd00::9"]}, "fd00::9"),
])  # fmt: skip
def test_an_endpoint_is_of_either_family(monkeypatch, endpoint, known, local_addresses, expected):
    results = [(0, 0, 0, "", address) for address in known]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: results)
    monkeypatch.setattr("fsdpctl.launch.addresses._addresses_by_interface", lambda: local_addresses)
    assert resolve_endpoint(endpoint, for_others=True) == (expected, 1)


@pytest.mark.parametrize("address", [LOOPBACK, "::1"])
def test_a_store_is_reached_on_the_loopback_address_of_either_family(address: str) -> None:
    if interface_of(address) is None:
        pytest.skip("this machine does not have it")
    store, port = create_store(address)
    assert local_address(address, None)[0] == address
    connect_store(address, port, 20).set("key", "value")
    assert store.get("key") == b"value"
    named = re.escape(endpoint_of(address, port))
    with pytest.raises(UsageError, match=f"={named}: node 0 cannot"):
        create_store(address, port)


def test_an_unknown_interface_is_named() -> None:
    with pytest.raises(UsageError, match=r"launch.interface=eth99: .*expected one of .*lo"):
        local_address(LOOPBACK, "eth99")


@pytest.mark.parametrize(("named", "is_alone", "expected"), [
    (None, False, None), ("eth7", False, "=eth7"), (None, True, "=eth7"),
])  # fmt: skip
def test_nccl_gets_an_interface_only_if_the_user_names_one(monkeypatch, named, is_alone, expected):
    """Without `launch.interface`, nccl.conf and InfiniBand decide; one node uses loopback."""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    launch = LaunchConfig(nproc_per_node=1, interface=named)
    monkeypatch.setattr("fsdpctl.launch.workers.interface_of", lambda address: "eth7")
    nodes = None if is_alone else cast(NodeLauncher, SimpleNamespace(interface="eth7"))
    with _environment(launch, nodes):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        assert os.environ.get("NCCL_SOCKET_IFNAME") == expected


def test_other_commands_do_not_support_several_nodes() -> None:
    with pytest.raises(UsageError, match="only supported by `fsdpctl train`"):
        launch_workers([], launches(2, "h:1")[0])


def _start(machines: Hosts, folder: Path, *args: str) -> list[subprocess.Popen[str]]:
    endpoint = f"{machines.addresses[0]}:29500"
    nodes = [f"launch.nnodes={len(machines.names)}", f"launch.rdzv_endpoint={endpoint}"]
    args = (*SMALL, f"data.path={make_text(folder)}", f"train.run_dir={folder / 'run'}", *args)
    return [
        machines.start(host, "train", *args, *nodes, f"launch.node_rank={host}", cwd=folder)
        for host in range(len(machines.names))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "ranks", "strategy"),
    [(2, 1, "full_shard"), (3, 1, "shard_optimizer"), (2, 2, "hybrid_shard"), (2, 2, "no_shard")]
    + [(2, 2, "hybrid_shard_optimizer")],
)
def test_several_hosts_train_like_one_machine(tmp_path, nodes, ranks, strategy):
    args = [f"strategy={strategy}", "train.steps=30"]
    with hosts(nodes) as machines:
        ends = list(map(ended, _start(machines, tmp_path, *args, f"launch.nproc_per_node={ranks}")))
    assert [code for code, _ in ends] == [0] * nodes, ends
    if strategy.startswith("hybrid"):
        args.append(f"strategy.dp_shard_size={ranks}")  # one replica per host
    assert figures(tmp_path / "run") == alone(tmp_path, nodes * ranks, *args)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["signal", "file"])
def test_a_stop_request_on_one_node_saves_and_stops_all(tmp_path: Path, way: str) -> None:
    file = tmp_path / "run" / "STOP"
    with hosts(2) as machines:
        started = _start(machines, tmp_path, "launch.nproc_per_node=1", "train.steps=100000")
        wait_for(has_stepped(tmp_path, 1))
        if way == "file":
            file.touch()
        else:
            started[1].send_signal(signal.SIGTERM)
        ends = list(map(ended, started))
    assert [code for code, _ in ends] == [75, 75], ends
    assert all("saved" in text for _, text in ends)
    assert (all("STOP" in text for _, text in ends), file.exists()) == (way == "file", False)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "launcher"])
def test_a_rank_or_launcher_that_is_killed_is_named(tmp_path: Path, what: str) -> None:
    with hosts(2) as machines:
        started = _start(machines, tmp_path, "launch.nproc_per_node=1", "train.steps=100000")
        wait_for(has_stepped(tmp_path, 1))
        launcher = psutil.Process(started[1].pid)
        workers = launcher.children(recursive=True)
        rank = next(each for each in workers if "fsdpctl.training.worker" in each.cmdline())
        (rank if what == "rank" else launcher).kill()
        ends = list(map(ended, started))
    if what == "rank":
        assert [code for code, _ in ends] == [1, 1], ends
        assert all("rank 1" in text and "SIGKILL" in text for _, text in ends)
        return
    (code, messages), host = ends[0], socket.gethostname()
    assert (code, f"node 1 on {host} is unreachable; rank 0 stopped" in messages) == (1, True)
    assert "gloo" not in messages
    assert "gloo" in (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    messages = fsdpctl("status", "run", cwd=tmp_path).stdout
    assert f"failed: node 1 on {host} is unreachable\n" in messages
