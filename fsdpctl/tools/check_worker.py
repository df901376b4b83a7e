"""A rank that checks the nodes together with all others, before a run."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch

from fsdpctl.comm.base import Collectives
from fsdpctl.comm.collectives import collectives_for
from fsdpctl.comm.links import clock_offset, neighbors, ring_speed
from fsdpctl.comm.world import PrefixStore, Store, TCPStore, World, joined_world
from fsdpctl.io import files
from fsdpctl.io.control_group import host_memory
from fsdpctl.launch.handshake import decode, encode, source_digest, versions
from fsdpctl.train.worker import report, tie_to_launcher

MODULE = "fsdpctl.tools.check_worker"
_MIB = 1 << 20
_SENT = {"cpu": 4 * _MIB, "cuda": 128 * _MIB}  # bytes of a measurement
_APPEARING = 10.0  # seconds in which the files of other nodes must appear
_MOST_SKEW = 1.0  # seconds: nodes compare the times of heartbeats and files
_SLOW = 0.5  # of what is expected
_FEWEST = 3  # links of which a median says something
_RING = "ring of all ranks"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a check; only that of rank 0 counts."""

    run_dir: str
    timeout: float
    intra_bandwidth: float | None = None  # of `cluster`
    inter_bandwidth: float | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # content of files


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as its first rank describes it."""

    number: int
    host: str
    versions: str  # of fsdpctl, torch and Python
    source: str  # a digest of fsdpctl's
    ranks: int
    device: str
    memory_bytes: int
    available_bytes: int
    write_seconds: float | None = None  # of a MiB in the run directory: write, fsync and rename
    clock_offset_seconds: float | None = None  # ahead of node 0
    clock_error_seconds: float | None = None

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"node {self.number} ({self.host})"


@dataclass(frozen=True, slots=True)
class Link:
    """The slowest of some ranks that send and receive at the same time."""

    name: str
    gb_per_second: float  # per rank and direction
    setting: str  # of `cluster`, which says what to expect
    expected: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check. Without failures, the nodes can train together."""

    run_dir: str
    nodes: list[Node]
    links: list[Link] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def check(kind: str, request: Request, store: Store, say: Say) -> Report:
    """Check the nodes with all their ranks, which meet in `store`. Collective."""
    rank, size, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    memory = host_memory()
    own = Node(
        number=int(os.environ.get("GROUP_RANK", rank // local)),
        host=socket.gethostname(),
        versions=versions(),
        source=source_digest(),
        ranks=local,
        device=torch.cuda.get_device_name() if kind == "cuda" else "cpu",
        memory_bytes=memory,
        available_bytes=min(memory, psutil.virtual_memory().available),
    )
    say(f"waiting for {size} ranks")
    meeting, names = PrefixStore("members", store), [str(each) for each in range(size)]
    meeting.set(str(rank), encode(own))
    if rank == 0:
        meeting.set("request", encode(request))
    meeting.wait(["request", *names], timedelta(seconds=request.timeout))
    request = decode(meeting.get("request"), Request)
    members = [decode(meeting.get(name), Node) for name in names]
    nodes = list({each.number: each for each in reversed(members)}.values())[::-1]
    failures = list(_differences(nodes))
    if failures:  # they may not even understand each other
        return Report(request.run_dir, nodes, failures=failures)
    with joined_world(kind, request.timeout, store) as world:
        return _check_together(world, nodes, request, say)


def _differences(nodes: Sequence[Node]) -> Iterator[str]:
    first = nodes[0]
    for each in nodes[1:]:
        if each.versions != first.versions:
            yield f"{each.label}: {each.versions}; expected {first.versions}, as on node 0"
        elif each.source != first.source:
            yield f"{each.label}: fsdpctl's source differs from node 0's"
        if (each.ranks, each.device) != (first.ranks, first.device):
            expected = f"{first.ranks} on {first.device}, as on node 0"
            yield f"{each.label}: {each.ranks} ranks on {each.device}; expected {expected}"


def _check_together(world: World, nodes: list[Node], request: Request, say: Say) -> Report:
    ranks = collectives_for(world.device)
    say(f"run directory {request.run_dir}")
    written = _check_folder(ranks, Path(request.run_dir), request.token, nodes[0].ranks)
    firsts = [written[node.number * node.ranks] for node in nodes]
    say("clocks")
    clocks = [(0.0, 0.0)]
    for node in nodes[1:]:
        first = node.number * node.ranks
        clocks.append(clock_offset(first) if world.rank in (0, first) else (0.0, 0.0))
    clocks = ranks.gather_objects(clocks)[0]
    nodes = [
        replace(
            node,
            write_seconds=seconds,
            clock_offset_seconds=offset,
            clock_error_seconds=error,
        )
        for node, (seconds, _), (offset, error) in zip(nodes, firsts, clocks, strict=True)
    ]
    links = list(_measure(world, ranks, nodes, request, say))
    failures = [
        f"{node.label}: {request.run_dir}: {problem}"
        for node, (_, problem) in zip(nodes, firsts, strict=True)
        if problem
    ]
    failures += [
        f"{node.label}: clock {offset:+.1f} s from node 0's; expected at most {_MOST_SKEW:g} s"
        for node, (offset, error) in zip(nodes, clocks, strict=True)
        if abs(offset) - error > _MOST_SKEW
    ]
    return Report(request.run_dir, nodes, links, [*failures, *_slow(links)])


def _check_folder(
    ranks: Collectives, folder: Path, token: str, per_node: int
) -> list[tuple[float | None, str]]:
    """Write a file on the first rank of each node, and look for those of the others. Collective.

    Nothing remains. Returns the seconds, and the problem if any, of each rank.
    """
    made: list[Path] = []
    seconds, problem, own = None, "", folder / f".check-{token}-{ranks.rank}"
    if ranks.rank == 0:
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        problem = _problem(lambda: folder.mkdir(parents=True, exist_ok=True))
    ranks.barrier()
    if ranks.rank % per_node == 0:
        began = time.perf_counter()
        content = token * (_MIB // len(token))
        problem = problem or _problem(lambda: files.replace(own, content, durable=True))
        seconds = None if problem else time.perf_counter() - began
    has_written = ranks.gather_objects(seconds is not None)
    others = [folder / f".check-{token}-{rank}" for rank, wrote in enumerate(has_written) if wrote]
    if seconds is not None and (missing := _missing(others)):
        nodes = ", ".join(each.name.rpartition("-")[2] for each in missing)
        problem = f"files of rank {nodes} not found; expected a file system that all nodes share"
    found = ranks.gather_objects((seconds, problem))
    _problem(lambda: own.unlink(missing_ok=True))
    ranks.barrier()
    for each in made:
        _problem(each.rmdir)
    return found


def _problem(act: Callable[[], object]) -> str:
    """Return why `act` fails, or an empty string."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _missing(paths: list[Path]) -> list[Path]:
    """Return the files that do not appear in time."""
    until = time.monotonic() + _APPEARING
    while missing := [each for each in paths if not each.is_file()]:
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return missing


def _measure(
    world: World, ranks: Collectives, nodes: Sequence[Node], request: Request, say: Say
) -> Iterator[Link]:
    """Measure neighboring nodes with all their ranks, neighboring ranks, and the ring of all."""
    per_node, size = nodes[0].ranks, world.world_size
    node, local = divmod(world.rank, per_node)
    rings = (
        [each * per_node + local for each in neighbors(node, len(nodes))],
        [node * per_node + each for each in neighbors(local, per_node)],
        range(size),
    )
    speeds = []
    for number, ring in enumerate(rings, start=1):
        say(f"links {number}/{len(rings)}")
        speeds.append(ring_speed(ring, _SENT[world.device.type], world.device) / 1e9)
    found = ranks.gather_objects(speeds)  # by rank and round
    across, within = "inter_bandwidth", "intra_bandwidth"
    for group in dict.fromkeys(neighbors(each, len(nodes)) for each in range(len(nodes))):
        if len(group) > 1:
            own = found[group[0] * per_node : (group[-1] + 1) * per_node]
            name = " - ".join(f"node {each}" for each in group)
            yield Link(name, min(row[0] for row in own), across, request.inter_bandwidth)
    for each in nodes if per_node > 1 else ():
        own = found[each.number * per_node : (each.number + 1) * per_node]
        slowest = min(row[1] for row in own)
        yield Link(f"within node {each.number}", slowest, within, request.intra_bandwidth)
    if size > 1:
        setting = across if len(nodes) > 1 else within
        slowest, rank = min((row[2], rank) for rank, row in enumerate(found))
        name = f"{_RING}, slowest at rank {rank} on node {rank // per_node}"
        yield Link(name, slowest, setting, getattr(request, setting))


def _slow(links: Sequence[Link]) -> Iterator[str]:
    """Yield the links that are slow by `cluster`, or slower than others of their kind."""
    for link in links:
        alike = [
            each.gb_per_second
            for each in links
            if each.setting == link.setting and not each.name.startswith(_RING)
        ]
        typical = median(alike) if len(alike) >= _FEWEST else 0.0
        is_slow = f"{link.name}: {link.gb_per_second:.3g} GB/s per rank; expected at least half of"
        if link.gb_per_second < _SLOW * (link.expected or 0.0):
            yield f"{is_slow} cluster.{link.setting}={link.expected:g}"
        elif not link.name.startswith(_RING) and link.gb_per_second < _SLOW * typical:
            yield f"{is_slow} the median of such links, {typical:.3g}"


def main(kind: str, out: str, request: str) -> None:
    """Check the nodes, and write the report to a file on the first rank of each."""
    tie_to_launcher()
    is_main, is_first = (os.environ[name] == "0" for name in ("RANK", "LOCAL_RANK"))
    say = partial(print, file=sys.stderr, flush=True) if is_main else lambda line: None
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        found = check(kind, decode(request.encode(), Request), store, say)
        if is_first:
            Path(out).write_text(encode(found), encoding="utf-8")
    except Exception as error:
        report(error)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
