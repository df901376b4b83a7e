"""`fsdpctl check-nodes`."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpctl.cli.config_args import (
    ConfigArguments,
    RanksPerNode,
    composed_from,
    configured,
    normalized,
)
from fsdpctl.cli.console import add_row, emit, fail, new_table, note, say, show_table
from fsdpctl.errors import FsdpctlError
from fsdpctl.io.activity import doing

if TYPE_CHECKING:
    from fsdpctl.config.schema import Config
    from fsdpctl.resolve.launchers import Place
    from fsdpctl.tools.check_worker import Report, Request

_MOST_LINKS = 12  # in the table, the slowest
_GIB = 1 << 30


@configured
def check_nodes(
    config: ConfigArguments,
    nproc_per_node: RanksPerNode = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the nodes before a run on them.

    Start it like the run itself, with the same `launch` settings. It checks versions, clocks, the
    run directory and memory. It measures the bandwidth between neighboring nodes and ranks and
    around a ring of all ranks, and compares it with `cluster.inter_bandwidth` and
    `cluster.intra_bandwidth`. The exit code is 1 if a check fails.
    """
    # Torch, here and in the workers, would print C++ stacks about lost peers and unknown names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from fsdpctl.resolve.launchers import place_of

    composed = composed_from(normalized(config, nproc_per_node), quiet=as_json)
    launch, place = where = place_of(composed.config.launch)
    found = _found(composed.config, where)
    is_main = (launch.node_rank if place is None else place.rank) in (None, 0)
    if is_main and as_json:
        emit(json.dumps(asdict(found), indent=2))
    elif is_main:
        _show(found)
    if is_main or place is None:
        for line in found.failures:
            fail(line)
    if found.failures:
        raise typer.Exit(1)


def _found(config: "Config", where: "Place") -> "Report":
    """Check with the ranks that this process starts, or as one of another launcher's."""
    from fsdpctl.io.run_files import check_is_no_file
    from fsdpctl.tools.check_worker import Request, check

    run_dir = Path(config.train.run_dir or "runs")
    check_is_no_file(run_dir)
    asked = Request(
        str(run_dir.absolute()),
        config.launch.timeout,
        config.cluster.intra_bandwidth,
        config.cluster.inter_bandwidth,
    )
    launch, place = where
    if place is None:
        return _found_by_workers(config, where, asked)
    from fsdpctl.launch.run import joined_ranks

    launch, store = joined_ranks(config, where, place)
    return check(str(launch.device), asked, store, note if place.rank == 0 else lambda line: None)


def _found_by_workers(config: "Config", where: "Place", asked: "Request") -> "Report":
    from fsdpctl.launch.handshake import decode, encode
    from fsdpctl.launch.local import launch_workers
    from fsdpctl.launch.nodes import Nodes
    from fsdpctl.resolve.machine import placed_here
    from fsdpctl.tools.check_worker import MODULE, Report

    launch = placed_here(config, where).launch
    nodes = Nodes(launch) if launch.nnodes > 1 else None
    with tempfile.TemporaryDirectory(prefix="fsdpctl-") as kept:
        out = Path(kept) / "report.json"
        try:
            if nodes is not None:
                note(f"node {nodes.own} of {launch.nnodes}: waiting for the others")
                nodes.handshake.wait_for_all()
            args = [str(launch.device), str(out), encode(asked)]
            with doing("measuring"):
                outcome = launch_workers(MODULE, args, launch, logs=out.parent, nodes=nodes)
        finally:
            if nodes is not None:
                nodes.leave()
        outcome.raise_if_stopped("the check was complete")
        if outcome.has_failed:
            raise FsdpctlError(f"check not complete: {outcome.reason}")
        return decode(out.read_bytes(), Report)


def _show(found: "Report") -> None:
    right = ("ranks", "memory", "available", "clock", "write")
    nodes = new_table("node", "host", "ranks", "device", *right[1:], right=right)
    for each in found.nodes:
        offset, error, seconds = (
            each.clock_offset_seconds, each.clock_error_seconds, each.write_seconds,
        )  # fmt: skip
        add_row(
            nodes, str(each.number), each.host, str(each.ranks), each.device,
            f"{each.memory_bytes / _GIB:.1f} GiB", f"{each.available_bytes / _GIB:.1f} GiB",
            "" if offset is None or error is None
            else f"{1e3 * offset:+.1f} ± {1e3 * error:.1f} ms",
            "" if seconds is None else f"{1e3 * seconds:.1f} ms",
        )  # fmt: skip
    show_table(nodes)
    if found.links:
        say()
        links = new_table("link", "GB/s per rank", "cluster.*", right=("GB/s per rank",))
        slowest = sorted(found.links, key=lambda link: link.gb_per_second)[:_MOST_LINKS]
        for link in slowest:
            setting = "" if link.expected is None else f"{link.setting}={link.expected:g}"
            add_row(links, link.name, f"{link.gb_per_second:.3g}", setting)
        show_table(links)
        if more := len(found.links) - len(slowest):
            say(f"and {more} faster ones")
    say(f"\n{found.nodes[0].versions}; run directory {found.run_dir}")
    count = len(found.failures)
    say(f"{count} check{'s' if count > 1 else ''} failed" if count else "all checks passed")
