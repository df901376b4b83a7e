"""Prepares a run and trains it, with the launchers of other machines or as one rank of many."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpctl.cli.choosing import decide
from fsdpctl.cli.console import CONVERSATIONS, count_of, say
from fsdpctl.cli.ending import end
from fsdpctl.cli.rounds import Started, follow_in_rounds, train_in_rounds
from fsdpctl.errors import FsdpctlError

if TYPE_CHECKING:
    from fsdpctl.config.compose import Composed
    from fsdpctl.config.placement import LaunchConfig
    from fsdpctl.launch.meeting import Meeting, Plan
    from fsdpctl.launch.nodes import Nodes
    from fsdpctl.launch.outcome import Outcome
    from fsdpctl.resolve.launchers import RankPlace

STARTED = "FSDPCTL_STARTED"  # for workers, whose time is limited: seconds since the epoch


def run(composed: "Composed", typed: list[str], resume: str) -> None:
    """Train: start ranks here, beside those of other machines, or be one that was started.

    Raises:
        FsdpctlError: it cannot begin; how it ended once it had begun is the exit code.
    """
    from fsdpctl.resolve.launchers import place_of

    os.environ.setdefault(STARTED, str(time.time()))
    launch, place = place_of(composed.config.launch)
    if place is not None:
        _as_rank(composed, typed, resume, place)
    elif launch.nnodes == 1:
        started = _begin(composed, typed, resume, probes=True)
        if started is not None:
            end(train_in_rounds(started), started.run_dir)
    else:
        _as_node(composed, typed, resume)


# ---- one of several machines -------------------------------------------------------------


def _as_node(composed: "Composed", typed: list[str], resume: str) -> None:
    _silence_torch_of_lost_peers()
    from fsdpctl.launch.nodes import Nodes
    from fsdpctl.resolve.machine import placed_here

    launch = placed_here(composed.config).launch
    say(f"node {launch.node_rank} of {launch.nnodes}: meeting at {launch.rdzv_endpoint}")
    nodes = Nodes(launch)
    try:
        if nodes.own == 0:
            outcome = _as_first_node(composed, typed, resume, nodes)
        else:
            outcome = _as_another_node(launch, nodes)
    finally:
        nodes.leave()
    if outcome is not None:
        end(*outcome)


def _as_first_node(
    composed: "Composed", typed: list[str], resume: str, nodes: "Nodes"
) -> "tuple[Outcome, Path] | None":
    started = _invite(nodes.meeting, lambda: _begin(composed, typed, resume))
    if started is None:
        return None
    return train_in_rounds(started, nodes), started.run_dir


def _as_another_node(launch: "LaunchConfig", nodes: "Nodes") -> "tuple[Outcome, Path] | None":
    plan = _accept(nodes.meeting, launch)
    if plan is None:
        say("node 0: the run is finished; nothing to do")
        return None
    say(f"run     {plan.run_dir}: {launch.nproc_per_node} ranks here")
    return follow_in_rounds(Path(plan.run_dir), launch, nodes), Path(plan.run_dir)


def _invite(meeting: "Meeting", begin: "Callable[[], Started | None]") -> "Started | None":
    """Begin, and have the others take part; they are told where that fails or there is no need."""
    try:
        started = begin()
        if started is None:
            meeting.call_off("the run is finished; nothing to do", is_finished=True)
            return None
        say(f"waiting for the other {meeting.count - 1} of {meeting.count} {meeting.noun}s")
        assert started.launch.nproc_per_node is not None
        meeting.invite(started.run_dir, started.launch.nproc_per_node)
    except FsdpctlError as error:
        meeting.call_off(str(error))
        raise
    except BaseException:
        meeting.call_off("was stopped before it began")
        raise
    return started


def _accept(meeting: "Meeting", launch: "LaunchConfig") -> "Plan | None":
    """What is to be done, or nothing; the others are told where this one goes away."""
    from fsdpctl.launch.meeting import difference

    try:
        plan = meeting.accept(lambda plan: difference(plan, launch))
    except FsdpctlError:
        raise
    except BaseException:
        meeting.leave("was stopped before it began")
        raise
    return None if plan.is_finished else plan


def _silence_torch_of_lost_peers() -> None:
    """What becomes of other launchers is said in a line; torch writes stacks of C++ beside that.

    It looks once, when it is imported; the workers' own logs have them.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name not in os.environ:
        os.environ[name] = "ERROR"
        import torch  # noqa: F401  # for what it looks at

        del os.environ[name]


# ---- one rank of another launcher --------------------------------------------------------


def _as_rank(composed: "Composed", typed: list[str], resume: str, place: "RankPlace") -> None:
    """Meet the other ranks, then be the worker itself: this process ends with it."""
    cores = (os.cpu_count() or 1) // place.local_world_size
    own = {"OMP_NUM_THREADS": str(max(1, cores))}
    if composed.config.launch.device != "cpu":
        own |= composed.config.launch.allocator_environment
    os.environ.update({**own, **os.environ})  # before torch is imported
    from fsdpctl.comm.stores import PrefixStore
    from fsdpctl.launch.interface import own_address, split_endpoint
    from fsdpctl.launch.meeting import Meeting
    from fsdpctl.launch.nodes import reached_store
    from fsdpctl.resolve.machine import placed_here
    from fsdpctl.train.worker import become_rank

    launch = placed_here(composed.config).launch
    others = place.world_size > place.local_world_size
    address, port = split_endpoint(f"{place.address}:{place.port}", for_others=others)
    is_first = place.rank == 0 and not place.store_is_there
    whole = reached_store(address, port, launch.timeout, is_first=is_first)
    store = PrefixStore(f"attempt-{place.attempt}", whole)
    meeting = Meeting(store, place.rank, place.world_size, noun="rank", patience=launch.timeout)
    # What `begun` has of a lock is held until this process ends.
    begun: Started | Plan | None
    if place.rank == 0:
        begun = _invite(meeting, lambda: _begin(composed, typed, resume))
    else:
        begun = _accept(meeting, launch)
    if begun is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", own_address(address, launch.interface)[1])
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        os.environ[name.upper()] = str(getattr(place, name))
    become_rank(Path(begun.run_dir), store)


# ---- the run directory -------------------------------------------------------------------


def _begin(
    composed: "Composed", typed: list[str], resume: str, *, probes: bool = False
) -> "Started | None":
    """Lock and prepare the run directory; None where there is nothing to do.

    What is left to choose is chosen here alone, and others read it from there: without probing,
    for which all of them would have to be there already.
    """
    from fsdpctl.config.model_path import RUN_CONFIG
    from fsdpctl.estimate.automatic import resolved_with_stand_ins
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.kept import estimate_here, write_estimate
    from fsdpctl.run.assets import collect_assets
    from fsdpctl.run.directory import Standing, plan_start, prepare_run_dir
    from fsdpctl.run.lock import lock_run_dir
    from fsdpctl.train.describe import describe_run

    with count_of(CONVERSATIONS) as advance:
        run = resolved_with_stand_ins(composed, on_rows=advance)
    start = plan_start(run.config, resume)
    if start.standing is Standing.FINISHED:
        say(f"{start.run_dir}: finished at step {start.step}; nothing to do")
        say("a larger train.steps goes on from there; --resume never begins anew beside it")
        return None
    decided = decide(composed, run, resume, probes=probes)
    lock = lock_run_dir(
        start.run_dir, lambda: say(f"waiting for the workers of the last start of {start.run_dir}")
    )
    if resume == "auto" and (start.run_dir / RUN_CONFIG).is_file():  # maybe since a moment ago
        decided = decide(composed, run, resume)
    composed, run, chosen = decided
    start = plan_start(run.config, resume, start.run_dir)  # it may have moved on until now
    estimator = Estimator()
    estimate = estimate_here(run, estimator)
    for line in [*chosen, *describe_run(run, start, estimate)]:
        say(line)
    prepare_run_dir(start, typed, collect_assets(run.config, run.data))
    write_estimate(start.run_dir, run, estimate, estimator)
    train = replace(run.config.train, run_dir=str(start.run_dir))
    config = replace(run.config, train=train)
    return Started(start.run_dir, lock, composed.config, config, start.step)
