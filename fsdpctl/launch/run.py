"""The three roles of this process: the launcher of one node, one of many launchers, or a rank.

Imports torch only inside functions: a rank sets torch's environment variables first.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.config.schema import Origin
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io.activity import Reporter, doing
from fsdpctl.io.resources import has_cpu_affinity
from fsdpctl.resolve.launchers import LauncherRank, LaunchRole, endpoint_of, role_of, role_of_script
from fsdpctl.training.worker import STARTED

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed
    from fsdpctl.config.launch import LaunchConfig
    from fsdpctl.config.schema import Config
    from fsdpctl.launch.handshake import Handshake, Invitation
    from fsdpctl.launch.outcome import RoundOutcome
    from fsdpctl.launch.prepare_run import PreparedRun
    from fsdpctl.resolve.script_module import ScriptTask

    Prepare = Callable[[], PreparedRun | None]  # None: the run is finished

_trained_tasks: "list[ScriptTask]" = []  # at most one: train_task() is called once per process


def train_on_node(
    composed: "Composed", settings: list[str], resume: str, reporter: Reporter
) -> "tuple[RoundOutcome, Path] | None":
    """Start the ranks of this node, or become a rank that another launcher has started.

    Returns the outcome and the run directory, or None if the run is finished already.
    """
    os.environ.setdefault(STARTED, str(time.time()))
    config = composed.config
    if config.origins.get("cluster") is Origin.RECIPE and config.launch.name == "local":
        # The recipe's number of ranks must not decide the role of this process.
        from fsdpctl.resolve.machine import without_other_cluster

        composed = without_other_cluster(composed)
    role = role_of(composed.config.launch)
    this_rank = role.rank
    model = composed.config.model
    if not role.starts_all_ranks and model.path is not None:
        # Every node needs the model's files, but only one process prepares the run.
        from fsdpctl.config.hub import local_model, part_for_training

        local_model(model.path, part_for_training(model))
    prepare = partial(_prepare, composed, settings, resume, reporter, role)
    if this_rank is not None:
        _run_as_rank(composed.config, role, this_rank, prepare, reporter)
        return None
    if not role.starts_all_ranks:
        return _run_as_node(composed.config, role, prepare, reporter)
    prepared = prepare()
    if prepared is None:
        return None
    from fsdpctl.launch.restarts import train_with_restarts

    return train_with_restarts(prepared, reporter.result), prepared.run_dir


def train_task(
    task: "ScriptTask", composed: "Composed", settings: list[str], reporter: Reporter
) -> None:
    """Train a module of a script as one rank; the process exits if the run is not complete."""
    if _trained_tasks:
        raise UsageError("fsdpctl.train: this process has called it before; start another process")
    _trained_tasks.append(task)
    environment = dict(os.environ)
    os.environ[STARTED] = str(time.time())
    role = role_of_script(composed.config.launch)
    assert role.rank is not None
    prepare = partial(_prepare, composed, settings, "auto", reporter, role, task=task)
    prepared = _run_as_rank(composed.config, role, role.rank, prepare, reporter, task)
    from fsdpctl.launch.prepare_run import PreparedRun

    if isinstance(prepared, PreparedRun):  # on rank 0
        prepared.lock.release()
        reporter.result(f"done: {prepared.run_dir}")
    os.environ.clear()  # programs that the script starts must not become ranks
    os.environ.update(environment)


def _prepare(*args: Any, **kwargs: Any) -> "PreparedRun | None":
    # A rank first sets the variables that torch reads when prepare_run imports it.
    from fsdpctl.launch.prepare_run import prepare_run

    return prepare_run(*args, **kwargs)


def _run_as_node(
    config: "Config", role: LaunchRole, prepare: "Prepare", reporter: Reporter
) -> "tuple[RoundOutcome, Path] | None":
    from fsdpctl.launch.nodes import NodeLauncher
    from fsdpctl.launch.restarts import follow_restarts, train_with_restarts
    from fsdpctl.resolve.machine import assign_ranks

    launch = assign_ranks(config, role).launch
    node_text = f"node {launch.node_rank} of {launch.nnodes}"
    reporter.info(f"{node_text}: connecting to {launch.rdzv_endpoint}")
    with doing("connecting"):
        launcher = NodeLauncher(launch)
    try:
        if launcher.node_rank == 0:
            prepared = _lead(launcher.handshake, prepare, reporter)
            if prepared is None:
                return None
            return train_with_restarts(prepared, reporter.result, launcher), prepared.run_dir
        with doing("waiting for node 0"):
            invitation = _accept(launcher.handshake, launch)
        if invitation is None:
            reporter.result("node 0: the run is finished; nothing to do")
            return None
        ranks_text = "1 rank" if launch.nproc_per_node == 1 else f"{launch.nproc_per_node} ranks"
        run_dir = Path(invitation.run_dir)
        reporter.info(f"run     {run_dir}: {ranks_text} on this node; node 0 shows the progress")
        return follow_restarts(run_dir, launch, launcher, reporter.result), run_dir
    finally:
        launcher.leave()


def _lead(handshake: "Handshake", prepare: "Prepare", reporter: Reporter) -> "PreparedRun | None":
    """Prepare the run, then invite the other members; return None if the run is finished."""
    try:
        prepared = prepare()
        if prepared is None:
            handshake.cancel("the run is finished; nothing to do", is_finished=True)
            return None
        others_text = f"the other {handshake.count - 1} of {handshake.count} {handshake.noun}s"
        if handshake.count > 1:
            reporter.info(f"waiting for {others_text}")
        assert prepared.launch.nproc_per_node is not None
        with doing(f"waiting for {others_text}"):
            handshake.invite(prepared.run_dir, prepared.launch.nproc_per_node)
    except FsdpctlError as error:
        handshake.cancel(str(error))
        raise
    except BaseException:
        handshake.cancel("stopped before the run started")
        raise
    return prepared


def _accept(handshake: "Handshake", launch: "LaunchConfig") -> "Invitation | None":
    from fsdpctl.launch.handshake import describe_difference

    try:
        noun = handshake.noun
        invitation = handshake.accept(lambda received: describe_difference(received, launch, noun))
    except FsdpctlError:
        raise
    except BaseException:
        handshake.withdraw("stopped before the run started")
        raise
    return None if invitation.is_finished else invitation


def _print_line(descriptor: int, text: str) -> None:
    with suppress(OSError):
        os.write(descriptor, f"fsdpctl: {text}\n".encode())


def _run_as_rank(
    config: "Config",
    role: LaunchRole,
    this_rank: LauncherRank,
    prepare: "Prepare",
    reporter: Reporter,
    task: "ScriptTask | None" = None,
) -> "PreparedRun | Invitation | None":
    """Join the other ranks in a handshake, then become the worker; this process exits with it.

    Returns only if `task` is given; else the exit of the process releases rank 0's lock. Without
    an address of rank 0, this rank is the only one.
    """
    per_node = this_rank.local_world_size
    variables = config.launch.rank_environment(1 if has_cpu_affinity() else per_node)
    os.environ.update({**variables, **os.environ})  # torch reads them when it is imported
    from fsdpctl.comm.world import PrefixStore, TCPStore
    from fsdpctl.launch.addresses import local_address, loopback, open_store, resolve_endpoint
    from fsdpctl.resolve.machine import assign_ranks

    launch = assign_ranks(config, role).launch
    rank, world_size = this_rank.rank, this_rank.world_size
    num_nodes = world_size // per_node
    address, port = loopback(), 0
    if this_rank.address:
        endpoint = endpoint_of(this_rank.address, this_rank.port)
        address, port = resolve_endpoint(endpoint, for_others=num_nodes > 1)
    hosts_store = rank == 0 and not this_rank.has_store
    root_store = open_store(address, port, launch.timeout, hosts_store=hosts_store)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", local_address(address, launch.interface)[1])
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        os.environ[name.upper()] = str(getattr(this_rank, name))
    from fsdpctl.launch.handshake import Handshake
    from fsdpctl.launch.nodes import NodeExchange
    from fsdpctl.launch.watchdog import watch_as_rank
    from fsdpctl.training.worker import become_rank

    prefix = f"attempt-{this_rank.restarts}"
    store = PrefixStore(prefix, root_store)
    handshake = Handshake(store, rank, world_size, noun="rank", timeout=launch.timeout)
    prepared = _lead(handshake, prepare, reporter) if rank == 0 else _accept(handshake, launch)
    if prepared is None:
        return None
    exchange = None
    if num_nodes > 1:
        # A second connection: a blocked call of the exchange's thread must not block `store`.
        exchange_store = PrefixStore(prefix, TCPStore(address, port, is_master=False))
        lost_after = launch.used_hang_timeout
        exchange = NodeExchange(exchange_store, rank // per_node, num_nodes, lost_after)
    # The worker redirects descriptor 2 to its log; the copy stays open until the process exits.
    watch_as_rank(this_rank, launch, store, exchange, partial(_print_line, os.dup(2)))
    become_rank(Path(prepared.run_dir), store, task)  # returns to a script only
    return prepared
