"""Starts this machine's workers and waits for them, whatever happens to them or to us."""

import logging
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.launch.interface import LOOPBACK, loopback_interface
from fsdpctl.launch.outcome import Outcome, failure_of
from fsdpctl.launch.stopping import StoppedEarlyError, passing_on

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from fsdpctl.launch.meeting import Meeting

_FILES, _FILES_A_RANK = 128, 16  # that a launcher has open, with some to spare
_NO_SIGNAL = "SIGURG"  # what the agent handles itself: one that nobody sends


def launch_workers(
    module: str,
    args: Sequence[str],
    launch: LaunchConfig,
    *,
    logs: Path,
    is_last: bool = False,
    meeting: "Meeting | None" = None,
) -> Outcome:
    """Run `python -m module args…` on ranks of this machine until all have ended.

    Args:
        module: what to run; it finds its rank in torchrun's environment variables.
        args: its arguments.
        launch: resolved; how many, and how they keep memory.
        logs: an existing directory for the agent's own log.
        is_last: requests to stop that come later are ignored.
        meeting: of the launchers of all machines, where there are several.

    Raises:
        UsageError: several machines without a meeting, or too few files may be open.
        FsdpctlError: torch's agent failed.
    """
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    ranks = launch.nproc_per_node
    assert ranks is not None
    if launch.nnodes > 1 and meeting is None:
        raise UsageError(
            f"launch.nnodes={launch.nnodes}: only `fsdpctl train` runs on several machines"
        )
    node = 0 if meeting is None else meeting.node
    interface = loopback_interface() if meeting is None else meeting.interface
    _make_room_for_files(ranks)
    errors = tempfile.TemporaryDirectory(prefix="fsdpctl-", ignore_cleanup_errors=True)
    # It has the workers' errors; the run's own directory may be full, or gone.
    with (
        _logging_to(logs / f"node-{node:05d}.log"),
        errors as folder,
        _environment(ranks, launch, interface, is_alone=meeting is None),
    ):
        agent = LocalElasticAgent(
            _spec(module, args, ranks, meeting), DefaultLogsSpecs(log_dir=folder)
        )
        group = agent.get_worker_group()
        with passing_on(lambda: group.state is not WorkerState.INIT, is_last=is_last) as requests:
            try:
                found = agent.run().failures
            except StoppedEarlyError:
                return Outcome((), requests.first, stopped_early=True)
            except Exception as error:  # of the agent; it has ended the workers
                raise FsdpctlError(f"the launcher failed: {error!r:.300}") from None
    failures = tuple(failure_of(rank, each) for rank, each in sorted(found.items()))
    if meeting is None:
        return Outcome(failures, requests.first)
    failures, silent = meeting.share_failures(failures)
    return Outcome(failures, requests.first, silent_nodes=silent)


def _spec(module: str, args: Sequence[str], ranks: int, meeting: "Meeting | None") -> "WorkerSpec":
    """What torch's agent shall run, and where its workers meet."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from fsdpctl.launch.rendezvous import Rendezvous

    if meeting is None:
        rendezvous, address = Rendezvous(), LOOPBACK
    else:
        address = meeting.address
        rendezvous = Rendezvous(meeting.store, meeting.port, node=meeting.node, nodes=meeting.nodes)
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

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Say nothing of it."""


@contextmanager
def _environment(
    ranks: int, launch: LaunchConfig, interface: str | None, *, is_alone: bool
) -> Iterator[None]:
    """What workers inherit: a share of the cores, their launcher, an interface, an allocator.

    What is set already stays as it is, but for where ranks listen: on one machine, nowhere that
    another one reaches; on several, where gloo's others look for them.
    """
    values = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    if launch.device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        grows = launch.allocator == "expandable"
        values["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{grows}"
    forced = {
        "FSDPCTL_LAUNCHER": str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _NO_SIGNAL,
    }
    if interface is not None:
        forced["GLOO_SOCKET_IFNAME"] = interface
        (forced if is_alone else values)["NCCL_SOCKET_IFNAME"] = f"={interface}"
    before = dict(os.environ)
    os.environ.update({**values, **before, **forced})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
