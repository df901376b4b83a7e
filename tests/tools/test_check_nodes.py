"""Nodes that are checked before a run: what is measured, and each fault named."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdpctl.comm.links import neighbors
from fsdpctl.comm.world import World
from fsdpctl.io import files
from fsdpctl.tools import check_worker
from fsdpctl.tools.check_worker import Node, Report, Request, _check_together, _differences
from tests.cli.run import command, environment
from tests.distributed import distributed
from tests.launch.hosts import Hosts, hosts
from tests.launch.test_nodes import free_endpoint

_NODE = Node(0, "a", "fsdpctl 1, torch 2, Python 3", "abc", 2, "cpu", 1 << 34, 1 << 33)
_TWO = [_NODE, replace(_NODE, number=1, host="b")]
_SECONDS = 120


def test_each_member_has_neighbors_that_have_it() -> None:
    assert [[*neighbors(number, 4)] for number in range(4)] == [[0, 1]] * 2 + [[2, 3]] * 2
    assert [[*neighbors(number, 5)] for number in range(5)] == [[0, 1]] * 2 + [[2, 3, 4]] * 3
    assert [*neighbors(0, 1)] == [0]


def _checked(rank: int, run_dir: Path, **expected: float) -> Report:
    """Four ranks as two nodes."""
    world = World(rank, rank % 2, 4, torch.device("cpu"))
    request = Request(str(run_dir), 20.0, token="0123456789abcdef", **expected)
    return _check_together(world, _TWO, request, lambda line: None)


@distributed(world_size=4)
def test_faults_are_named(rank: int, world_size: int, tmp_path: Path) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(check_worker, "_SENT", {"cpu": 1 << 14})
    run_dir = tmp_path / "not" / "there"
    good = _checked(rank, run_dir)
    assert good.failures == []
    assert [each.name.partition(",")[0] for each in good.links] == [
        "node 0 - node 1", "within node 0", "within node 1", "ring of all ranks"
    ]  # fmt: skip
    assert all(each.gb_per_second > 0 for each in good.links)
    _, second = good.nodes
    assert second.clock_offset_seconds is not None
    assert abs(second.clock_offset_seconds) <= (second.clock_error_seconds or 0) < 10
    assert 0 < (second.write_seconds or 0) < 10
    assert rank > 0 or not (tmp_path / "not").exists()  # nothing remains

    with patch.context() as faulty:
        faulty.setattr(check_worker, "_APPEARING", 0.2)
        if rank >= 2:  # the second node: a clock, a directory and a link of its own
            now = time.time
            faulty.setattr(time, "time", lambda: now() + 7)
            write = files.replace
            (tmp_path / str(rank)).mkdir()
            faulty.setattr(
                files, "replace",
                lambda path, content, **how: write(tmp_path / str(rank) / path.name, content),
            )  # fmt: skip
        bad = _checked(rank, run_dir, inter_bandwidth=900.0)
    shared = "not found; expected a file system that all nodes share"
    ring, between = bad.failures.pop(), bad.failures.pop()
    assert bad.failures == [
        f"node 0 (a): {run_dir}: files of rank 2 {shared}",
        f"node 1 (b): {run_dir}: files of rank 2 {shared}",
        "node 1 (b): clock +7.0 s from node 0's; expected at most 1 s",
    ]
    assert between.startswith("node 0 - node 1: ")
    assert ring.startswith("ring of all ranks, slowest at rank ")
    assert between.endswith("expected at least half of cluster.inter_bandwidth=900")

    (tmp_path / "file").touch()
    lost = _checked(rank, tmp_path / "file" / "run")
    assert [line.rpartition(": ")[2] for line in lost.failures] == ["Not a directory"] * 2


def test_a_link_slower_than_the_others_is_named() -> None:
    link = check_worker.Link("node 0 - node 1", 10.0, "inter_bandwidth", None)
    links = [
        link,
        replace(link, name="node 0 - node 2", gb_per_second=4.0),
        replace(link, name="node 1 - node 2", gb_per_second=9.0),
        replace(link, name="within node 0", gb_per_second=200.0, setting="intra_bandwidth"),
        replace(link, name="ring of all ranks, slowest at rank 1 on node 1", gb_per_second=1.0),
    ]
    assert list(check_worker._slow(links)) == [
        "node 0 - node 2: 4 GB/s per rank; expected at least half of the median of such links, 9"
    ]


def test_different_nodes_are_named() -> None:
    other = _TWO[1]
    assert list(_differences(_TWO)) == []
    found = _differences([_NODE, replace(other, versions="fsdpctl 2, torch 2, Python 3")])
    assert list(found) == [
        "node 1 (b): fsdpctl 2, torch 2, Python 3; expected fsdpctl 1, torch 2, Python 3, as on "
        "node 0"
    ]
    found = _differences([_NODE, replace(other, source="abd", ranks=1)])
    assert list(found) == [
        "node 1 (b): fsdpctl's source differs from node 0's",
        "node 1 (b): 1 ranks on cpu; expected 2 on cpu, as on node 0",
    ]


# ---- as a command ------------------------------------------------------------------------


def _start(*words: str, cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command("check-nodes", *words), cwd=cwd, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _node(node: int, endpoint: str, count: int = 2) -> list[str]:
    return [
        f"launch.nnodes={count}",
        f"launch.node_rank={node}",
        f"launch.rdzv_endpoint={endpoint}",
    ]


def _ended(started: Sequence["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    said = [each.communicate(timeout=_SECONDS) for each in started]
    return [(each.returncode, *texts) for each, texts in zip(started, said, strict=True)]


@pytest.mark.slow
def test_two_nodes_pass_and_node_0_prints(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    started = [
        _start(*_node(node, endpoint), "launch.nproc_per_node=1", "--json", cwd=tmp_path)
        for node in (0, 1)
    ]
    (first, found, said), (second, nothing, _) = _ended(started)
    assert (first, second) == (0, 0), said
    assert nothing == ""
    report = json.loads(found)
    assert [each["number"] for each in report["nodes"]] == [0, 1]
    assert [each["name"].partition(",")[0] for each in report["links"]] == [
        "node 0 - node 1", "ring of all ranks"
    ]  # fmt: skip
    assert report["failures"] == []
    assert "links 3/3" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_nodes_with_different_ranks_fail_on_both(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    started = [
        _start(*_node(node, endpoint), f"launch.nproc_per_node={node + 1}", cwd=tmp_path)
        for node in (0, 1)
    ]
    for code, _, said in _ended(started):
        assert code == 1, said
        assert "2 ranks on cpu; expected 1 on cpu, as on node 0" in " ".join(said.split())


@pytest.mark.slow
def test_a_missing_node_is_named(tmp_path: Path) -> None:
    words = [*_node(0, free_endpoint(), 3), "launch.timeout=2"]
    ((code, _, said),) = _ended([_start(*words, cwd=tmp_path)])
    assert code == 2
    assert "node 1, 2: not started within 2 s (launch.timeout)" in said


@pytest.mark.slow
def test_ranks_of_torchrun_check_too(tmp_path: Path) -> None:
    words = [*command("check-nodes", "launch=env")[1:]]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=_SECONDS,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("within node 0") == 1
    assert "all checks passed" in ended.stdout


def _on_hosts(found: Hosts, cwd: Path, *words: str) -> list[tuple[int, str]]:
    endpoint = f"{found.addresses[0]}:29500"
    started = [
        found.start(
            node, "check-nodes", *_node(node, endpoint, len(found.names)),
            "launch.nproc_per_node=1", f"train.run_dir={cwd / 'run'}", *words, cwd=cwd,
        )
        for node in range(len(found.names))
    ]  # fmt: skip
    said = [each.communicate(timeout=_SECONDS)[0] for each in started]
    return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


@pytest.mark.slow
def test_the_bandwidth_of_cables_is_measured(tmp_path: Path) -> None:
    with hosts(3, mbit=400) as found:
        ended = _on_hosts(found, tmp_path, "--json")
        assert [code for code, _ in ended] == [0, 0, 0], ended
        text = ended[0][1]
        report = json.loads(text[text.index("{") : text.rindex("}") + 1])
        assert report["links"][0]["name"] == "node 0 - node 1 - node 2"
        speeds = [each["gb_per_second"] for each in report["links"]]
        assert all(0.025 < each < 0.06 for each in speeds), speeds  # 0.05 is the cable's
        clocks = [each["clock_offset_seconds"] for each in report["nodes"]]
        assert all(abs(each) < 0.05 for each in clocks)
        ended = _on_hosts(found, tmp_path, "cluster.inter_bandwidth=1")
    for code, text in ended:
        assert code == 1
        assert text.count("expected at least half of cluster.inter_bandwidth=1") == 2


@pytest.mark.slow
def test_a_directory_that_is_not_shared_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    words = ["launch.nproc_per_node=1", f"train.run_dir={tmp_path / 'run'}"]
    with hosts(2) as found:
        endpoint = f"{found.addresses[0]}:29500"
        mounts = ["", f"mount -t tmpfs none {tmp_path / 'run'} && "]
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", found.names[node], "unshare", "-m", "sh", "-c",
                 f'{mount}exec "$@"', "sh",
                 *command("check-nodes", *_node(node, endpoint), *words)],
                cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for node, mount in enumerate(mounts)
        ]  # fmt: skip
        for code, _, said in _ended(started):
            assert code == 1, said
            assert said.count("expected a file system that all nodes share") == 2
