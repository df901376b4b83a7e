"""Train in rounds: after a failure, the remaining ranks resume from the newest checkpoint."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from fsdpctl.config.placement import LaunchConfig
from fsdpctl.config.schema import Settled
from fsdpctl.config.serialize import config_words
from fsdpctl.errors import FINAL, LOST, UsageError
from fsdpctl.io.activity import DISPLAY
from fsdpctl.io.run_files import METRICS, RUN_CONFIG
from fsdpctl.launch.begin import Begun
from fsdpctl.launch.nodes import Nodes, RestartRound
from fsdpctl.launch.outcome import Outcome
from fsdpctl.launch.workers import launch_workers
from fsdpctl.resolve.settle import settle
from fsdpctl.run.directory import changes, look, prepare_restart
from fsdpctl.run.environment import Restart, read_records
from fsdpctl.run.metrics import last_step
from fsdpctl.training.callbacks.reporting import RESTART
from fsdpctl.training.requests import take_stop

Say = Callable[[str], None]


def train_with_restarts(begun: Begun, say: Say, nodes: Nodes | None = None) -> Outcome:
    """Start the ranks, and restart them after failures; return the outcome of the last round.

    The run is unlocked at the end. `nodes` are the launchers of the other nodes, if any; this one
    is node 0.
    """
    most = begun.launch.max_restarts
    for number in range(most + 1):
        outcome = _launch(begun.run_dir, begun.launch, nodes, number)
        following = None if number == most else _next_round(begun, outcome, number, nodes, say)
        if nodes is not None:
            nodes.order(number, following or RestartRound())
        if following is None:
            break
    begun.lock.release()
    return outcome


def follow_restarts(run_dir: Path, launch: LaunchConfig, nodes: Nodes, say: Say) -> Outcome:
    """Start and restart the ranks of another node, as node 0 orders."""
    number = 0
    while True:
        outcome = _launch(run_dir, launch, nodes, number)
        following = nodes.await_order(number)
        if nodes.own not in following.nodes:
            return outcome
        number += 1
        ranks = following.nproc_per_node
        say(f"restart {number}: {ranks} rank{'s' * (ranks != 1)} on this node")
        launch = replace(launch, nproc_per_node=following.nproc_per_node)


def _launch(run_dir: Path, launch: LaunchConfig, nodes: Nodes | None, number: int) -> Outcome:
    DISPLAY.stop()  # rank 0 shows what it is doing
    is_last = number == launch.max_restarts
    return launch_workers([str(run_dir)], launch, is_last=is_last, nodes=nodes, number=number)


def _next_round(
    begun: Begun, outcome: Outcome, number: int, nodes: Nodes | None, say: Say
) -> RestartRound | None:
    cause = outcome.cause
    if not outcome.has_failed or outcome.was_asked or (cause and cause.exit_code in FINAL):
        return None
    if not (begun.run_dir / RUN_CONFIG).is_file() or (cause and LOST in cause.message):
        return None  # who removed the files shall hear of it
    if take_stop(begun.run_dir):
        say(f"{begun.run_dir}: no restart (stop requested)")
        return None
    metrics = begun.run_dir / METRICS
    is_stuck = number > 0 and not went_on(begun.run_dir, number)
    reached = begun.step if is_stuck else last_step(metrics)
    members = [0] if nodes is None else [n for n in nodes.members if n not in outcome.silent]
    config = settled_on(begun, members, say, is_stuck=is_stuck)
    if config is None:
        return None
    seen = look(config, "auto", only_here=True)
    prepare_restart(seen, number + 1)
    changed = changes(replace(seen, before=config_words(begun.config)), config)
    begun.config, begun.step = config, seen.step
    ranks, lost = config.launch.nproc_per_node, max(0, reached - seen.step)
    assert ranks is not None
    say(
        f"restart {number + 1} of {begun.launch.max_restarts}: {outcome.reason}; "
        f"{len(members) * ranks} ranks resume at step {seen.step}, {lost} steps lost"
    )
    for text in changed:
        say(f"{'changed':<8}{text}")
    # The workers record it after their first step.
    restart = Restart(number + 1, outcome.reason, outcome.failed_at or time.time(), lost)
    os.environ[RESTART] = msgspec.json.encode(restart).decode()
    return RestartRound(members, ranks)


def went_on(run_dir: Path, restart: int) -> bool:
    """Return whether the ranks of restart number `restart`, the newest, completed a step."""
    with suppress(UsageError):  # a file that others refuse to read
        newest = read_records(run_dir)[-1:]
        return any(x.restart is not None and x.restart.number == restart for x in newest)
    return False


def settled_on(begun: Begun, members: list[int], say: Say, *, is_stuck: bool) -> Settled | None:
    """Settle the run on the remaining nodes, with one rank fewer per node if it was stuck."""
    launch = begun.launch
    least_nodes = launch.nnodes_min or launch.nnodes
    if len(members) < least_nodes:
        say(
            f"no restart: {len(members)} of {launch.nnodes} nodes remain; launch.nnodes_min="
            f"{least_nodes}"
        )
        return None
    ranks = launch.nproc_per_node
    assert ranks is not None
    least = min(launch.nproc_min or ranks, ranks)
    problem = ""
    for count in range(max(ranks - is_stuck, least), least - 1, -1):
        try:
            fewer = replace(launch, nnodes=len(members), nproc_per_node=count)
            return settle(begun.plan.asked, launch=fewer).config
        except UsageError as error:
            problem = str(error)
    say(f"no restart with the remaining ranks: {problem}")
    return None
