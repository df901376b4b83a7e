"""Trains in rounds: where ranks fail, those that are left go on from the newest checkpoint."""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpctl.cli.console import say
from fsdpctl.errors import UsageError

if TYPE_CHECKING:
    from fsdpctl.config.placement import LaunchConfig
    from fsdpctl.config.schema import Config
    from fsdpctl.launch.nodes import Nodes, Round
    from fsdpctl.launch.outcome import Outcome
    from fsdpctl.run.lock import RunLock

_FINAL = (2, 4, 75, 76)  # another start would end in the same way, or somebody asked for it


@dataclass(slots=True)
class Started:
    """A run whose directory is locked and prepared."""

    run_dir: Path
    lock: "RunLock"
    asked: "Config"  # as requested, with everything selected
    config: "Config"  # resolved for the ranks of the current round
    step: int  # of the checkpoint that the round begins with

    @property
    def launch(self) -> "LaunchConfig":
        """The ranks of the current round."""
        return self.config.launch


def train_in_rounds(started: Started, nodes: "Nodes | None" = None) -> "Outcome":
    """Start ranks, and again where they fail and that may help; how the last round ended.

    Those of other machines are told by `nodes`, of which this is the first.
    """
    from fsdpctl.launch.nodes import Round

    most = started.launch.max_restarts
    for number in range(most + 1):
        outcome = _launch(started.run_dir, started.launch, nodes, number)
        following = None if number == most else _following(started, outcome, number, nodes)
        if nodes is not None:
            nodes.order(number, following or Round())
        if following is None:
            break
    started.lock.release()
    return outcome


def follow_in_rounds(run_dir: Path, launch: "LaunchConfig", nodes: "Nodes") -> "Outcome":
    """The same on another machine, as the first one orders."""
    number = 0
    while True:
        outcome = _launch(run_dir, launch, nodes, number)
        following = nodes.await_order(number)
        if nodes.own not in following.nodes:
            return outcome
        number += 1
        say(f"restart {number}: {following.nproc_per_node} ranks here")
        launch = replace(launch, nproc_per_node=following.nproc_per_node)


def _launch(run_dir: Path, launch: "LaunchConfig", nodes: "Nodes | None", number: int) -> "Outcome":
    from fsdpctl.launch.local import launch_workers
    from fsdpctl.run.directory import LOGS
    from fsdpctl.train.worker import MODULE

    is_last = number == launch.max_restarts
    logs = run_dir / LOGS
    return launch_workers(
        MODULE, [str(run_dir)], launch, logs=logs, is_last=is_last, nodes=nodes, number=number
    )


def _following(
    started: Started, outcome: "Outcome", number: int, nodes: "Nodes | None"
) -> "Round | None":
    """Prepare the next round, if there is to be one."""
    from fsdpctl.launch.nodes import Round
    from fsdpctl.run.directory import METRICS, plan_start, prepare_restart
    from fsdpctl.run.metrics import last_step, went_on
    from fsdpctl.train.requests import take_stop

    cause = outcome.cause
    if not outcome.has_failed or outcome.was_asked or (cause and cause.exit_code in _FINAL):
        return None
    if take_stop(started.run_dir):
        say(f"{started.run_dir}: was asked to stop: no restart")
        return None
    metrics = started.run_dir / METRICS
    is_stuck = number > 0 and not went_on(metrics, number)
    reached = started.step if is_stuck else last_step(metrics)
    members = [0] if nodes is None else [n for n in nodes.members if n not in outcome.silent_nodes]
    config = _resolved_for(started, members, is_stuck=is_stuck)
    if config is None:
        return None
    start = plan_start(config, "auto")
    prepare_restart(start, number + 1)
    started.config, started.step = config, start.step
    ranks = config.launch.nproc_per_node
    assert ranks is not None
    say(
        f"restart {number + 1} of {started.launch.max_restarts}: {outcome.reason}; "
        f"{len(members) * ranks} ranks go on from step {start.step}, "
        f"{max(0, reached - start.step)} steps are lost"
    )
    _tell_workers(outcome, number + 1, max(0, reached - start.step))
    return Round(members, ranks)


def _resolved_for(started: Started, members: list[int], *, is_stuck: bool) -> "Config | None":
    """Return the run on the nodes that are left, with one rank less per node if it was stuck."""
    from fsdpctl.resolve.run import on_ranks

    launch = started.launch
    least_nodes = launch.nnodes_min or launch.nnodes
    if len(members) < least_nodes:
        say(f"{len(members)} of {launch.nnodes} nodes are left: launch.nnodes_min={least_nodes}")
        return None
    ranks = launch.nproc_per_node
    assert ranks is not None
    least = min(launch.nproc_min or ranks, ranks)
    refused = ""
    for count in range(max(ranks - is_stuck, least), least - 1, -1):
        try:
            fewer = replace(launch, nnodes=len(members), nproc_per_node=count)
            return on_ranks(started.config, started.asked, fewer)
        except UsageError as error:
            refused = str(error)
    say(f"no restart with the ranks that are left: {refused}")
    return None


def _tell_workers(outcome: "Outcome", number: int, lost_steps: int) -> None:
    """What the next workers write down of it, once they have trained a step."""
    from fsdpctl.train.restart import RESTART, Restart

    restart = Restart(number, outcome.reason, outcome.failed_at or time.time(), lost_steps)
    os.environ[RESTART] = restart.to_text()
