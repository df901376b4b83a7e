"""Starting of this node's workers, forwarding of stop requests, and waiting until all have exited.

Note: workers have their own sessions, so Ctrl-C reaches only the launcher. The first request is
forwarded to them as SIGTERM. A worker that is still starting exits without a message; later,
workers finish their step, save and exit. torch's agent is not informed, because its own way of
stopping loses their exit codes. A second Ctrl-C kills the workers; other repeated requests are
ignored.
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
from fsdpctl.training.worker import MODULE, STATUS_FILE

_BARRIER_SECONDS = 1  # short, because launchers wait for each other on their own
_NO_SIGNAL = "SIGURG"  # the only signal that the agent handles: one that is never sent
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

    It gets its rank from torchrun's environment variables. If `is_last`, stop requests are ignored
    afterwards. `number` counts the rounds of this launch. UsageError if several nodes are
    configured without `nodes`. FsdpctlError if torch's agent fails.
    """
    if launcher is None and (launch.nnodes > 1 or launch.name == "env"):
        problem = "only supported by `fsdpctl train`"
        raise UsageError(f"launch={launch.name} launch.nnodes={launch.nnodes}: {problem}")
    assert launch.nproc_per_node is not None
    logger = logging.getLogger("torch.distributed")  # of the agent: fsdpctl reports failures
    logger.propagate, logger.handlers = False, [logging.NullHandler()]
    folder = tempfile.TemporaryDirectory(prefix="fsdpctl-", ignore_cleanup_errors=True)
    # For the workers' files: the run's own directory may be full, or deleted.
    with folder as log_dir, _environment(launch, launcher):
        pages = make_status_file(launch.nproc_per_node, Path(log_dir))
        os.environ.update({STATUS_FILE: str(pages), "FSDPCTL_ROUND": str(round_index)})
        agent = LocalElasticAgent(
            _worker_spec(args, launch.nproc_per_node, launcher, round_index),
            DefaultLogsSpecs(log_dir=log_dir), exit_barrier_timeout=_BARRIER_SECONDS,
        )  # fmt: skip
        group = agent.get_worker_group()
        watchdog = Watchdog(
            pages, launch, launcher, round_index,
            pids=lambda: {each.local_rank: each.id for each in group.workers if each.id},
        )  # fmt: skip
        have_begun = lambda: group.state is not WorkerState.INIT  # noqa: E731
        with _StopRequests(have_begun, is_last=is_last) as requests, watchdog:
            ended = _run(agent, requests, watchdog)
    return (
        RoundOutcome.combine({0: ended}, 0)
        if launcher is None
        else launcher.exchange_outcomes(round_index, ended)
    )


def _run(agent: LocalElasticAgent, requests: "_StopRequests", watchdog: Watchdog) -> NodeOutcome:
    kills = count_oom_kills()
    try:
        process_failures = agent.run().failures
    except _StoppedEarlyError:
        return NodeOutcome((), requests.first, stopped_early=True)
    except Exception as error:  # from the agent, which has ended the workers
        raise FsdpctlError(f"launcher failed: {error!r:.300}") from None
    oom_killed = count_oom_kills() > kills
    failures = [
        to_failure(rank, each, oom_killed=oom_killed) for rank, each in process_failures.items()
    ]
    if watchdog.killed_for_other_node:  # the killed ones did not cause the failure
        failures = [each for each in failures if not each.was_killed]
    failures.sort(key=lambda each: each.rank)
    return NodeOutcome(
        tuple(failures), requests.first, hang=watchdog.hang,
        failed_at=watchdog.failed_at or time.time(), were_killed=watchdog.killed_for_other_node,
    )  # fmt: skip


def _worker_spec(
    args: Sequence[str], ranks: int, launcher: NodeLauncher | None, round_index: int
) -> WorkerSpec:
    store: Store
    if launcher is None:
        (store, port), place, address = create_store(loopback()), (0, 1), loopback()
    else:
        store = PrefixStore(f"round-{round_index}", launcher.store)
        place, address, port = (
            launcher.place(),
            launcher.endpoint_address,
            launcher.port,
        )
    return WorkerSpec(
        role="default",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=("-P", "-m", MODULE, *args),  # -P: do not import modules from the current directory
        rdzv_handler=_FixedRendezvous(
            RendezvousInfo(store, *place, RendezvousStoreInfo(address, port))
        ),
        max_restarts=0,  # its own would keep the ranks and the batch; restarts.py settles both
        monitor_interval=0.1,
    )


class _FixedRendezvous(StaticTCPRendezvous):
    """The launchers that have met: torch's own ways to meet listen on all interfaces or unpickle.

    Workers use the launchers' store too, so that none of them opens a port.
    """

    run_id = "fsdpctl"

    def __init__(self, found: RendezvousInfo) -> None:
        self._found = found

    def next_rendezvous(self) -> RendezvousInfo:
        return self._found


@contextmanager
def _environment(launch: LaunchConfig, launcher: NodeLauncher | None) -> Iterator[None]:
    """Set the environment that workers inherit from the agent: cores, interface and allocator.

    Variables that are set keep their values, except those of the interface to listen on: on one
    node, the loopback interface; on several, the one where other nodes' gloo connects.
    """
    assert launch.nproc_per_node is not None
    values = launch.rank_environment(launch.nproc_per_node)
    forced = {"FSDPCTL_LAUNCHER": str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": _NO_SIGNAL}
    interface = launcher.interface if launcher else interface_of(loopback())
    if interface is not None:
        forced["GLOO_SOCKET_IFNAME"] = interface
        if (
            launcher is None or launch.interface is not None
        ):  # else NCCL selects its interfaces itself
            (values if launcher else forced)["NCCL_SOCKET_IFNAME"] = f"={interface}"
    before = dict(os.environ)
    os.environ.update({**values, **before, **forced})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _StoppedEarlyError(BaseException):
    """A stop was requested before there were workers to forward it to."""


class _StopRequests:
    """Forwards the first stop request to the workers in a block; a second Ctrl-C kills them."""

    def __init__(self, have_begun: Callable[[], bool], *, is_last: bool) -> None:
        """`have_begun`: whether there are workers; `is_last`: nothing is left to stop later."""
        self.first: int | None = None
        self._have_begun, self._is_last = have_begun, is_last

    def __enter__(self) -> "_StopRequests":
        # A signal may be ignored, for example because of nohup.
        handled = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._is_last else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
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
            raise _StoppedEarlyError
