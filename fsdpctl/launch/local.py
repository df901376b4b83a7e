"""Starts this machine's workers and waits for them, whatever happens to them or to us."""

import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.launch.interface import LOOPBACK, loopback_interface
from fsdpctl.launch.out_of_memory import kills_so_far
from fsdpctl.launch.outcome import Ended, Outcome, failure_of
from fsdpctl.launch.stopping import StoppedEarlyError, passing_on
from fsdpctl.launch.watch import FOLDER, Watch

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from fsdpctl.launch.nodes import Nodes

_FILES, _FILES_A_RANK = 128, 16  # that a launcher has open, with some to spare
_BARRIER_SECONDS = 1  # launchers wait for each other themselves
_NO_SIGNAL = "SIGURG"  # what the agent handles itself: one that nobody sends


def launch_workers(
    module: str,
    args: Sequence[str],
    launch: LaunchConfig,
    *,
    logs: Path,
    is_last: bool = False,
    nodes: "Nodes | None" = None,
    number: int = 0,
) -> Outcome:
    """Run `python -m module args…` on ranks of this machine until all have ended.

    Args:
        module: what to run; it finds its rank in torchrun's environment variables.
        args: its arguments.
        launch: resolved; how many, and how they keep memory.
        logs: an existing directory for the agent's own log.
        is_last: requests to stop that come later are ignored.
        nodes: the launchers of all machines, where there are several.
        number: how often ranks were started before, in this launch.

    Raises:
        UsageError: several machines that have not met, or too few files may be open.
        FsdpctlError: torch's agent failed.
    """
    if nodes is None and (launch.nnodes > 1 or launch.name == "env"):
        raise UsageError(
            f"launch={launch.name} launch.nnodes={launch.nnodes}: only `fsdpctl train` runs on "
            "several machines, or as ranks of another launcher"
        )
    assert launch.nproc_per_node is not None
    _make_room_for_files(launch.nproc_per_node)
    own, interface = (0, loopback_interface()) if nodes is None else (nodes.own, nodes.interface)
    folder = tempfile.TemporaryDirectory(prefix="fsdpctl-", ignore_cleanup_errors=True)
    # It has what workers leave for us; the run's own directory may be full, or gone.
    with (
        _logging_to(logs / f"node-{own:05d}.log"),
        folder as kept,
        _environment(launch, interface, is_alone=nodes is None),
    ):
        os.environ.update({FOLDER: kept, "FSDPCTL_ROUND": str(number)})
        spec = _spec(module, args, launch.nproc_per_node, nodes, number)
        ended = _run_round(spec, launch, Path(kept), nodes, number, is_last=is_last)
    return Outcome.of({0: ended}, 0) if nodes is None else nodes.share(number, ended)


def _run_round(
    spec: "WorkerSpec",
    launch: LaunchConfig,
    folder: Path,
    nodes: "Nodes | None",
    number: int,
    *,
    is_last: bool,
) -> Ended:
    """Start the workers, watch over them, and see how they end."""
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    kills = kills_so_far()
    agent = LocalElasticAgent(
        spec, DefaultLogsSpecs(log_dir=str(folder)), exit_barrier_timeout=_BARRIER_SECONDS
    )
    group = agent.get_worker_group()
    watch = Watch(
        folder, launch, lambda: {each.local_rank: each.id for each in group.workers if each.id},
        nodes, number,
    )  # fmt: skip
    have_begun = lambda: group.state is not WorkerState.INIT  # noqa: E731
    with passing_on(have_begun, is_last=is_last) as requests, watch:
        try:
            found = agent.run().failures
        except StoppedEarlyError:
            return Ended((), requests.first, stopped_early=True)
        except Exception as error:  # of the agent; it has ended the workers
            raise FsdpctlError(f"the launcher failed: {error!r:.300}") from None
    short = kills_so_far() > kills
    failures = [failure_of(rank, each, short_of_memory=short) for rank, each in found.items()]
    if watch.follows:  # they are no cause of anything
        failures = [each for each in failures if not each.was_killed]
    failures.sort(key=lambda each: each.rank)
    return Ended(
        tuple(failures), requests.first, hang=watch.hang,
        failed_at=watch.failed_at or time.time(), were_ended=watch.follows,
    )  # fmt: skip


def _spec(
    module: str, args: Sequence[str], ranks: int, nodes: "Nodes | None", number: int
) -> "WorkerSpec":
    """What torch's agent shall run, and where its workers meet."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from fsdpctl.launch.rendezvous import Rendezvous

    if nodes is None:
        rendezvous, address = Rendezvous(), LOOPBACK
    else:
        address = nodes.address
        there = (nodes.endpoint_address, nodes.port)
        rendezvous = Rendezvous(nodes.place(), nodes.store_of(number), there)
    return WorkerSpec(
        role="default",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=("-P", "-m", module, *args),  # -P: files in the current folder are no modules
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=address,
    )


def _make_room_for_files(ranks: int) -> None:
    """Raise the limit of open files where it is low, which workers inherit.

    Raises:
        UsageError: it may not be raised that far.
    """
    needed = _FILES + _FILES_A_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"launch.nproc_per_node={ranks}: needs {needed} open files, where {hard} are allowed; "
            "`ulimit -n` shows and sets that"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send what the agent logs to a file: what matters of it is said in one panel."""
    logger = logging.getLogger("torch.distributed")
    handler = _QuietHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.propagate, logger.handlers
    logger.propagate, logger.handlers = False, [handler]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = before
        handler.close()


class _QuietHandler(logging.FileHandler):
    """What cannot be written is left out: no log may end a training."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the file cannot be opened: the run directory may be deleted."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Say nothing of it."""


@contextmanager
def _environment(launch: LaunchConfig, interface: str | None, *, is_alone: bool) -> Iterator[None]:
    """What workers inherit: a share of the cores, their launcher, an interface, an allocator.

    What is set already stays as it is, but for where ranks listen: on one machine, nowhere that
    another one reaches; on several, where gloo's others look for them.
    """
    assert launch.nproc_per_node is not None
    values = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // launch.nproc_per_node))}
    if launch.device == "cuda":
        values |= launch.allocator_environment
    forced = {
        "FSDPCTL_LAUNCHER": str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _NO_SIGNAL,
    }
    if interface is not None:
        forced["GLOO_SOCKET_IFNAME"] = interface
        if is_alone or launch.interface is not None:  # else NCCL knows its own interfaces best
            (forced if is_alone else values)["NCCL_SOCKET_IFNAME"] = f"={interface}"
    before = dict(os.environ)
    os.environ.update({**values, **before, **forced})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
