"""Starting of this node's workers, forwarding of stop requests, and waiting until all have exited.

Note: workers have their own sessions, so Ctrl-C reaches only the launcher. The first request is
forwarded to them as SIGTERM. A worker that is still starting exits without a message; later,
workers finish their step, save and exit. torch's agent is not informed, because its own way of
stopping loses their exit codes. A second Ctrl-C kills the workers; other repeated requests are
ignored.
"""

import logging
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from fsdpctl.comm.rank_status import make_status_file
from fsdpctl.comm.world import PrefixStore, Store
from fsdpctl.config.placement import LaunchConfig
from fsdpctl.errors import STOP_SIGNALS, FsdpctlError, UsageError
from fsdpctl.io.files import open_own
from fsdpctl.launch.addresses import bound_store, interface_of, loopback
from fsdpctl.launch.nodes import Nodes
from fsdpctl.launch.outcome import Ended, Outcome, failure_of, kills_so_far
from fsdpctl.launch.watchdog import Watchdog
from fsdpctl.train.worker import MODULE, PAGES

_FILES, _FILES_PER_RANK = 128, 16  # open files of a launcher, with a reserve
_BARRIER_SECONDS = 1  # short, because launchers wait for each other on their own
_NO_SIGNAL = "SIGURG"  # the only signal that the agent handles: one that is never sent
_STDERR = 2


def launch_workers(
    args: Sequence[str],
    launch: LaunchConfig,
    *,
    logs: Path,
    is_last: bool = False,
    nodes: Nodes | None = None,
    number: int = 0,
) -> Outcome:
    """Run the worker with `args` on the ranks of this node until all have exited.

    It gets its rank from torchrun's environment variables. The directory `logs` gets the
    log of torch's agent. If `is_last`, stop requests are ignored afterwards. `number` counts the
    rounds of this launch.

    Raises:
        UsageError: If several nodes are configured without `nodes`, or too few files may be open.
        FsdpctlError: If torch's agent fails.
    """
    if nodes is None and (launch.nnodes > 1 or launch.name == "env"):
        raise UsageError(
            f"launch={launch.name} launch.nnodes={launch.nnodes}: only supported by `fsdpctl train`"
        )
    assert launch.nproc_per_node is not None
    _make_room_for_files(launch.nproc_per_node)
    own, interface = (nodes.own, nodes.interface) if nodes else (0, interface_of(loopback()))
    folder = tempfile.TemporaryDirectory(prefix="fsdpctl-", ignore_cleanup_errors=True)
    # For the workers' files: the run's own directory may be full, or deleted.
    with (
        _logging_to(logs / f"node-{own:05d}.log"),
        folder as kept,
        _environment(launch, interface, is_alone=nodes is None),
    ):
        pages = make_status_file(launch.nproc_per_node, Path(kept))
        os.environ.update({PAGES: str(pages), "FSDPCTL_ROUND": str(number)})
        spec = _spec(args, launch.nproc_per_node, nodes, number)
        ended = _run_round(spec, launch, Path(kept), nodes, number, is_last=is_last)
    return Outcome.of({0: ended}, 0) if nodes is None else nodes.share(number, ended)


def _run_round(
    spec: WorkerSpec,
    launch: LaunchConfig,
    folder: Path,
    nodes: Nodes | None,
    number: int,
    *,
    is_last: bool,
) -> Ended:
    kills = kills_so_far()
    agent = LocalElasticAgent(
        spec, DefaultLogsSpecs(log_dir=str(folder)), exit_barrier_timeout=_BARRIER_SECONDS
    )
    group = agent.get_worker_group()
    watchdog = Watchdog(
        Path(os.environ[PAGES]), launch, nodes, number,
        pids=lambda: {each.local_rank: each.id for each in group.workers if each.id},
    )  # fmt: skip
    have_begun = lambda: group.state is not WorkerState.INIT  # noqa: E731
    with passing_on(have_begun, is_last=is_last) as requests, watchdog:
        try:
            found = agent.run().failures
        except StoppedEarlyError:
            return Ended((), requests.first, stopped_early=True)
        except Exception as error:  # from the agent, which has ended the workers
            raise FsdpctlError(f"launcher failed: {error!r:.300}") from None
    short = kills_so_far() > kills
    failures = [failure_of(rank, each, short_of_memory=short) for rank, each in found.items()]
    if watchdog.follows:  # the killed ones did not cause the failure
        failures = [each for each in failures if not each.was_killed]
    failures.sort(key=lambda each: each.rank)
    return Ended(
        tuple(failures), requests.first, hang=watchdog.hang,
        failed_at=watchdog.failed_at or time.time(), were_ended=watchdog.follows,
    )  # fmt: skip


def _spec(args: Sequence[str], ranks: int, nodes: Nodes | None, number: int) -> WorkerSpec:
    store: Store
    if nodes is None:
        (store, port), place, address = bound_store(loopback()), (0, 1), loopback()
    else:
        store = PrefixStore(f"round-{number}", nodes.store)
        place, address, port = nodes.place(), nodes.endpoint_address, nodes.port
    return WorkerSpec(
        role="default",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=("-P", "-m", MODULE, *args),  # -P: do not import modules from the current directory
        rdzv_handler=_Met(RendezvousInfo(store, *place, RendezvousStoreInfo(address, port))),
        max_restarts=0,  # its own would keep the ranks and the batch; restarts.py settles both
        monitor_interval=0.1,
    )


class _Met(RendezvousHandler):
    """The launchers that have met. Torch's own ways to meet listen on all interfaces or unpickle.

    Workers use the launchers' store too, so that none of them opens a port.
    """

    use_agent_store = True

    def __init__(self, found: RendezvousInfo) -> None:
        self._found = found

    def next_rendezvous(self) -> RendezvousInfo:
        return self._found

    def get_backend(self) -> str:
        return "fsdpctl"

    get_run_id = get_backend

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _make_room_for_files(ranks: int) -> None:
    """Raise a low limit of open files, which workers inherit."""
    needed = _FILES + _FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"launch.nproc_per_node={ranks}: needs {needed} open files, but the limit is {hard}; "
            f"raise it with `ulimit -n {needed}`"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write the agent's log to a file; errors are shown in a panel instead."""
    logger = logging.getLogger("torch.distributed")
    handler = _QuietHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.propagate, logger.handlers
    logger.propagate, logger.handlers = False, [handler]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = before
        with suppress(OSError):  # the disk may be full
            handler.close()


class _QuietHandler(logging.FileHandler):
    """A log handler that ignores errors, so that logging cannot end a run."""

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(open_own(Path(self.baseFilename), "ab", folders=1), "utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the file cannot be opened: the run directory may be deleted."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Do nothing."""


@contextmanager
def _environment(launch: LaunchConfig, interface: str | None, *, is_alone: bool) -> Iterator[None]:
    """Set the environment that workers inherit: cores, launcher, interface and allocator.

    Variables that are set keep their values, except those of the interface to listen on: on one
    node, the loopback interface; on several, the one where other nodes' gloo connects.
    """
    assert launch.nproc_per_node is not None
    values = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // launch.nproc_per_node))}
    values |= launch.allocator_environment
    forced = {"FSDPCTL_LAUNCHER": str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": _NO_SIGNAL}
    if interface is not None:
        forced["GLOO_SOCKET_IFNAME"] = interface
        if is_alone or launch.interface is not None:  # else NCCL selects its interfaces itself
            (forced if is_alone else values)["NCCL_SOCKET_IFNAME"] = f"={interface}"
    before = dict(os.environ)
    os.environ.update({**values, **before, **forced})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class StoppedEarlyError(BaseException):
    """A stop was requested before there were workers to forward it to."""


class StopRequests:
    """A signal handler that forwards the first stop request; a second Ctrl-C kills the workers."""

    def __init__(self, have_begun: Callable[[], bool]) -> None:
        """Handle requests; `have_begun` returns whether workers have been started."""
        self.first: int | None = None
        self._have_begun = have_begun

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        again = self.first is not None
        if again and number != signal.SIGINT:
            return  # schedulers and closing terminals repeat themselves
        self.first = self.first or number
        if number == signal.SIGINT:  # written directly, because a progress bar may own the terminal
            line = b"killing\n" if again else b"stopping; Ctrl-C again kills\n"
            with suppress(OSError):  # it may be closed
                os.write(_STDERR, b"\n" + line)
        children = psutil.Process().children()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        if not children and not self._have_begun():
            raise StoppedEarlyError


@contextmanager
def passing_on(have_begun: Callable[[], bool], *, is_last: bool) -> Iterator[StopRequests]:
    """Forward stop requests to the workers while the block runs.

    `have_begun` returns whether there are workers. If `is_last`, requests are ignored after the
    block, when nothing is left to stop.
    """
    requests = StopRequests(have_begun)
    # A signal may be ignored, for example because of nohup.
    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, requests.handle) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_last else handler)
