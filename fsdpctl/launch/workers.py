"""The workers of this node: starting them, forwarding stop requests, waiting until all have exited.

Note: workers have their own sessions, so Ctrl-C reaches only the launcher, which forwards the first
request as SIGTERM. A worker that is still starting exits without a message; later, workers finish
their step, save and exit. torch's agent does not handle the signals, because it loses the workers'
exit codes when it stops them. A second Ctrl-C kills the workers; other repetitions are ignored.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fsdpctl.comm.rank_status import make_status_file
from fsdpctl.comm.world import PrefixStore, Store
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.errors import STOP_SIGNALS, FsdpctlError, UsageError
from fsdpctl.launch.addresses import create_store, interface_of, loopback
from fsdpctl.launch.nodes import NodeLauncher
from fsdpctl.launch.outcome import NodeOutcome, RoundOutcome, count_oom_kills, to_failure
from fsdpctl.launch.watchdog import Watchdog
from fsdpctl.training.worker import LAUNCHER, MODULE, STATUS_FILE

_BARRIER_SECONDS = 1  # short, because launchers exchange their outcomes in NodeExchange
_NO_SIGNAL = "SIGURG"  # the agent must handle at least one signal; this one is never sent
_STDERR = 2


def launch_workers(
    args: Sequence[str],
    launch: LaunchConfig,
    *,
    is_last: bool = False,
    launcher: NodeLauncher | None = None,
    round_index: int = 0,
) -> RoundOutcome:
    """Run the worker with `args` on the ranks of this node until all have exited.

    Each worker gets its rank from torchrun's environment variables. If `is_last`, stop requests are
    ignored afterwards, while the command reports the outcome. `round_index` counts the rounds of
    this launch. UsageError if several nodes are configured without a `launcher` that is connected
    to them. FsdpctlError if torch's agent fails.
    """
    if launcher is None and (launch.nnodes > 1 or launch.name == "env"):
        problem = "only supported by `fsdpctl train`"
        raise UsageError(f"launch={launch.name} launch.nnodes={launch.nnodes}: {problem}")
    assert launch.nproc_per_node is not None
    logger = logging.getLogger("torch.distributed")  # the agent's; fsdpctl reports failures
    logger.propagate, logger.handlers = False, [logging.NullHandler()]
    folder = tempfile.TemporaryDirectory(prefix="fsdpctl-", ignore_cleanup_errors=True)
    # The workers' files are not in the run directory, which may be full, or deleted.
    with folder as log_dir, _environment(launch, launcher):
        status_file = make_status_file(launch.nproc_per_node, Path(log_dir))
        os.environ.update({STATUS_FILE: str(status_file), "FSDPCTL_ROUND": str(round_index)})
        agent = LocalElasticAgent(
            _worker_spec(args, launch.nproc_per_node, launcher, round_index),
            DefaultLogsSpecs(log_dir=log_dir), exit_barrier_timeout=_BARRIER_SECONDS,
        )  # fmt: skip
        group = agent.get_worker_group()
        watchdog = Watchdog(
            status_file, launch, launcher, round_index,
            pids=lambda: {each.local_rank: each.id for each in group.workers if each.id},
        )  # fmt: skip
        requests = _StopRequests(lambda: group.state is not WorkerState.INIT, is_last=is_last)
        with requests, watchdog:
            outcome = _run(agent, requests, watchdog)
    if launcher is None:
        return RoundOutcome.combine({0: outcome}, node=0)
    return launcher.exchange_outcomes(round_index, outcome)


def _run(agent: LocalElasticAgent, requests: "_StopRequests", watchdog: Watchdog) -> NodeOutcome:
    kills = count_oom_kills()
    try:
        process_failures = agent.run().failures
    except _StoppedEarlyError:
        return NodeOutcome(stop_signal=requests.first, stopped_early=True)
    except Exception as error:  # an error of the agent, which has killed the workers
        raise FsdpctlError(f"launcher failed: {error!r:.300}") from None
    oom_killed = count_oom_kills() > kills
    by_rank = sorted(process_failures.items())
    failures = [to_failure(rank, each, oom_killed=oom_killed) for rank, each in by_rank]
    killed_for_other_node = watchdog.killed_for_other_node
    if killed_for_other_node:  # the killed workers did not cause the failure
        failures = [each for each in failures if not each.was_killed]
    return NodeOutcome(
        tuple(failures), requests.first, hang=watchdog.hang,
        failed_at=watchdog.failed_at or time.time(), killed_for_other_node=killed_for_other_node,
    )  # fmt: skip


def _worker_spec(
    args: Sequence[str], ranks: int, launcher: NodeLauncher | None, round_index: int
) -> WorkerSpec:
    store: Store
    if launcher is None:
        address, rank_and_size = loopback(), (0, 1)
        store, port = create_store(address)
    else:
        store = PrefixStore(f"round-{round_index}", launcher.store)
        address, port = launcher.address, launcher.port
        rank_and_size = launcher.group_rank, len(launcher.nodes)
    info = RendezvousInfo(store, *rank_and_size, RendezvousStoreInfo(address, port))
    return WorkerSpec(
        role="default",
        local_world_size=ranks,
        entrypoint=sys.executable,
        # -P: do not import modules from the current directory
        args=("-P", "-m", MODULE, *args),
        rdzv_handler=_FixedRendezvous(info),
        max_restarts=0,  # the agent would restart with the same ranks; restarts.py may use fewer
        monitor_interval=0.1,
    )


class _FixedRendezvous(StaticTCPRendezvous):
    """A rendezvous whose result is known: the launchers have completed their handshake.

    torch's other rendezvous listen on all interfaces, or unpickle messages. Workers use the
    launchers' store too, so that no worker opens a port.
    """

    run_id = "fsdpctl"

    # The __init__ of the base class would need an endpoint; only next_rendezvous is called.
    def __init__(self, info: RendezvousInfo) -> None:
        self._info = info

    def next_rendezvous(self) -> RendezvousInfo:
        return self._info


@contextmanager
def _environment(launch: LaunchConfig, launcher: NodeLauncher | None) -> Iterator[None]:
    """Set the environment that workers inherit from the agent: cores, interface and allocator.

    Variables that are already set win, except GLOO_SOCKET_IFNAME: the loopback interface on one
    node, else the one to which other nodes' gloo connects.
    """
    assert launch.nproc_per_node is not None
    values = launch.rank_environment(launch.nproc_per_node)
    forced = {LAUNCHER: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": _NO_SIGNAL}
    interface = launcher.interface if launcher else interface_of(loopback())
    if interface is not None:
        forced["GLOO_SOCKET_IFNAME"] = interface
        # On several nodes, NCCL selects its interfaces, unless `launch.interface` is set.
        if launcher is None or launch.interface is not None:
            # "=": the name itself, not a prefix of names.
            (values if launcher else forced)["NCCL_SOCKET_IFNAME"] = f"={interface}"
    original = dict(os.environ)
    os.environ.update({**values, **original, **forced})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(original)


class _StoppedEarlyError(BaseException):
    """A stop was requested before there were workers to forward it to."""


class _StopRequests:
    """A block that forwards the first stop request to workers; a second Ctrl-C kills them."""

    def __init__(self, have_begun: Callable[[], bool], *, is_last: bool) -> None:
        """Prepare; `have_begun()` returns whether workers exist.

        If `is_last`, later stop requests are ignored.
        """
        self.first: int | None = None
        self._have_begun, self._is_last = have_begun, is_last

    def __enter__(self) -> "_StopRequests":
        # A signal that is ignored stays ignored, such as SIGHUP under nohup.
        handled = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._old_handlers = {signum: signal.signal(signum, self._handle) for signum in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, signal.SIG_IGN if self._is_last else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        is_repeated = self.first is not None
        if is_repeated and signum != signal.SIGINT:
            return  # schedulers and closing terminals repeat signals
        self.first = self.first or signum
        if signum == signal.SIGINT:  # written directly, because a progress bar may own the terminal
            line = b"killing\n" if is_repeated else b"stopping; Ctrl-C again kills\n"
            with suppress(OSError):  # the terminal may be closed
                os.write(_STDERR, b"\n" + line)
        children = psutil.Process().children()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL if is_repeated else signal.SIGTERM)
        if not children and not self._have_begun():
            raise _StoppedEarlyError
