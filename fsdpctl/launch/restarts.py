"""Training in rounds: after a failure, the remaining ranks resume from the newest checkpoint."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from fsdpctl.config.launch import LaunchConfig
from fsdpctl.config.schema import Resolved
from fsdpctl.config.serialize import to_settings
from fsdpctl.errors import NO_RESTART, REMOVED_DURING_RUN, UsageError
from fsdpctl.io.activity import DISPLAY
from fsdpctl.io.run_files import METRICS, RUN_CONFIG
from fsdpctl.launch.nodes import NodeLauncher, RestartRound
from fsdpctl.launch.outcome import RoundOutcome
from fsdpctl.launch.prepare_run import PreparedRun
from fsdpctl.launch.workers import launch_workers
from fsdpctl.resolve.run_plan import make_run_plan
from fsdpctl.run.directory import changed_settings, inspect_run_dir, prepare_restart
from fsdpctl.run.environment import Restart, read_start_events
from fsdpctl.run.metrics import last_step
from fsdpctl.training.callbacks.reporting import RESTART
from fsdpctl.training.requests import take_stop_request

Say = Callable[[str], None]


def train_with_restarts(
    run: PreparedRun, say: Say, launcher: NodeLauncher | None = None
) -> RoundOutcome:
    """Start the ranks, and restart them after failures; return the outcome of the last round.

    The run is unlocked at the end. On several nodes, this is node 0, and its `launcher` is
    connected to the launchers of the other nodes.
    """
    last = run.launch.max_restarts
    for round_index in range(last + 1):
        outcome, following = _launch(run.run_dir, run.launch, launcher, round_index), None
        if round_index < last:
            following = _next_round(run, outcome, round_index, launcher, say)
        if launcher is not None:
            launcher.announce_next_round(round_index, following or RestartRound())
        if following is None:
            break
    run.lock.release()
    return outcome


def follow_restarts(
    run_dir: Path, launch: LaunchConfig, launcher: NodeLauncher, say: Say
) -> RoundOutcome:
    """Start and restart the ranks of a node other than node 0, which decides on restarts."""
    round_index = 0
    while True:
        outcome = _launch(run_dir, launch, launcher, round_index)
        following = launcher.wait_for_next_round(round_index)
        if launcher.node not in following.nodes:
            return outcome
        round_index += 1
        ranks = following.nproc_per_node
        say(f"restart {round_index}: {ranks} rank{'s' * (ranks != 1)} on this node")
        launch = replace(launch, nproc_per_node=following.nproc_per_node)


def _launch(
    run_dir: Path, launch: LaunchConfig, launcher: NodeLauncher | None, round_index: int
) -> RoundOutcome:
    DISPLAY.stop()  # rank 0 shows what it is doing
    is_last = round_index == launch.max_restarts
    args = [str(run_dir)]
    return launch_workers(args, launch, is_last=is_last, launcher=launcher, round_index=round_index)


def _next_round(
    run: PreparedRun,
    outcome: RoundOutcome,
    round_index: int,
    launcher: NodeLauncher | None,
    say: Say,
) -> RestartRound | None:
    """Prepare the run directory for the next round; return None if no restart follows."""
    if not _may_restart(run.run_dir, outcome, say):
        return None
    is_stuck = round_index > 0 and not made_progress(run.run_dir, round_index)
    last = run.step if is_stuck else last_step(run.run_dir / METRICS)
    members = [0] if launcher is None else launcher.members
    members = [node for node in members if node not in outcome.unreachable_nodes]
    config = settle_for_nodes(run, members, say, is_stuck=is_stuck)
    if config is None:
        return None
    state = inspect_run_dir(config, "auto", ignores_remote=True)
    prepare_restart(state, round_index + 1)
    changes = changed_settings(replace(state, previous_settings=to_settings(run.config)), config)
    run.config, run.step = config, state.step
    ranks, lost_steps = config.launch.nproc_per_node, max(0, last - state.step)
    assert ranks is not None
    say(
        f"restart {round_index + 1} of {run.launch.max_restarts}: {outcome.reason}; "
        f"{len(members) * ranks} ranks resume at step {state.step}, {lost_steps} steps lost"
    )
    for text in changes:
        say(f"{'changed':<8}{text}")
    # The workers record the restart after their first step.
    failed_at = outcome.failed_at or time.time()
    restart = Restart(round_index + 1, outcome.reason, failed_at, lost_steps)
    os.environ[RESTART] = msgspec.json.encode(restart).decode()
    return RestartRound(members, ranks)


def _may_restart(run_dir: Path, outcome: RoundOutcome, say: Say) -> bool:
    cause = outcome.cause
    if not outcome.has_failed or outcome.stop_requested:
        return False
    if cause and (cause.exit_code in NO_RESTART or REMOVED_DURING_RUN in cause.message):
        return False
    if not (run_dir / RUN_CONFIG).is_file():
        return False  # the command ends with the error: the files were deleted
    if take_stop_request(run_dir):
        say(f"{run_dir}: no restart (stop requested)")
        return False
    return True


def made_progress(run_dir: Path, restart: int) -> bool:
    """Return whether the ranks of restart number `restart`, the newest, completed a step."""
    with suppress(UsageError):  # commands that need the file report that it is corrupted
        newest = read_start_events(run_dir)[-1:]
        return any(x.restart is not None and x.restart.number == restart for x in newest)
    return False


def settle_for_nodes(
    run: PreparedRun, members: list[int], say: Say, *, is_stuck: bool
) -> Resolved | None:
    """Settle the run for the remaining nodes, with one rank fewer per node if it was stuck."""
    launch = run.launch
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
    # A number of ranks may not be supported, such as one that does not divide the batch.
    for count in range(max(ranks - is_stuck, least), least - 1, -1):
        try:
            fewer = replace(launch, nnodes=len(members), nproc_per_node=count)
            return make_run_plan(run.first_plan.requested, launch=fewer).config
        except UsageError as error:
            problem = str(error)
    say(f"no restart with the remaining ranks: {problem}")
    return None
