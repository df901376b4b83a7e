"""Starts workers on this machine and waits for them, whatever happens to them or to us."""

import logging
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.launch.loopback import LOOPBACK, loopback_interface
from fsdpctl.launch.outcome import Outcome, failure_of
from fsdpctl.launch.stopping import StoppedEarlyError, passing_on

_FILES, _FILES_A_RANK = 128, 16  # that a launcher has open, with some to spare
_NO_SIGNAL = "SIGURG"  # what the agent handles itself: one that nobody sends


def launch_workers(
    module: str, args: Sequence[str], launch: LaunchConfig, *, logs: Path, is_last: bool = False
) -> Outcome:
    """Run `python -m module args…` on ranks of this machine until all have ended.

    Args:
        module: what to run; it finds its rank in torchrun's environment variables.
        args: its arguments.
        launch: resolved; how many, and how they keep memory.
        logs: an existing directory for the agent's own log.
        is_last: requests to stop that come later are ignored.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from fsdpctl.launch.rendezvous import LoopbackRendezvous

    ranks = launch.nproc_per_node
    assert ranks is not None
    spec = WorkerSpec(
        role="default",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=("-P", "-m", module, *args),  # -P: files in the current folder are no modules
        rdzv_handler=LoopbackRendezvous(),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=LOOPBACK,
    )
    _make_room_for_files(ranks)
    errors = tempfile.TemporaryDirectory(prefix="fsdpctl-", ignore_cleanup_errors=True)
    # It has the workers' errors; the run's own directory may be full, or gone.
    with _logging_to(logs / "node-00000.log"), _environment(ranks, launch), errors as folder:
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder))
        group = agent.get_worker_group()
        with passing_on(lambda: group.state is not WorkerState.INIT, is_last=is_last) as requests:
            try:
                found = agent.run().failures
            except StoppedEarlyError:
                return Outcome((), requests.first, stopped_early=True)
            except Exception as error:  # of the agent; it has ended the workers
                raise FsdpctlError(f"the launcher failed: {error!r:.300}") from None
    failures = tuple(failure_of(rank, each) for rank, each in sorted(found.items()))
    return Outcome(failures, requests.first)


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
def _environment(ranks: int, launch: LaunchConfig) -> Iterator[None]:
    """What workers inherit: a share of the cores, their launcher, an interface, an allocator.

    What is set already stays as it is, but for where ranks listen: on one machine, nowhere that
    another one reaches.
    """
    values = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    if launch.device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        grows = launch.allocator == "expandable"
        values["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{grows}"
    forced = {
        "FSDPCTL_LAUNCHER": str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _NO_SIGNAL,
    }
    if interface := loopback_interface():
        forced |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    before = dict(os.environ)
    os.environ.update({**values, **before, **forced})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
