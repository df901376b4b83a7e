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
from fsdpctl.training.callbacks.reporting import RESTART_VARIABLE
from fsdpctl.training.requests import take_stop_request

Say = Callable[[str], None]


def train_with_restarts(
    prepared: PreparedRun, say: Say, launcher: NodeLauncher | None = None
) -> RoundOutcome:
    """Start the ranks, and restart them after failures; return the outcome of the last round.

    The run is unlocked at the end. On several nodes, node 0 calls this with its `launcher`.
    """
    last_round = prepared.launch.max_restarts
    for round_index in range(last_round + 1):
        outcome = _launch(prepared.run_dir, prepared.launch, launcher, round_index)
        next_round = None
        if round_index < last_round:
            next_round = _next_round(prepared, outcome, round_index, launcher, say)
        if launcher is not None:
            launcher.announce_next_round(round_index, next_round or RestartRound())
        if next_round is None:
            break
    prepared.lock.release()
    return outcome


def follow_restarts(
    run_dir: Path, launch: LaunchConfig, launcher: NodeLauncher, say: Say
) -> RoundOutcome:
    """Start and restart the ranks of a node other than node 0, which decides on restarts."""
    round_index = 0
    while True:
        outcome = _launch(run_dir, launch, launcher, round_index)
        next_round = launcher.wait_for_next_round(round_index)
        if launcher.node_rank not in next_round.nodes:
            return outcome
        round_index += 1
        ranks = next_round.nproc_per_node
        say(f"restart {round_index}: {ranks} rank{'s' * (ranks != 1)} on this node")
        launch = replace(launch, nproc_per_node=ranks)


def _launch(
    run_dir: Path, launch: LaunchConfig, launcher: NodeLauncher | None, round_index: int
) -> RoundOutcome:
    DISPLAY.stop()  # rank 0 shows what it is doing
    return launch_workers(
        [str(run_dir)], launch, launcher=launcher, round_index=round_index,
        is_last=round_index == launch.max_restarts,
    )  # fmt: skip


def _next_round(
    prepared: PreparedRun,
    outcome: RoundOutcome,
    round_index: int,
    launcher: NodeLauncher | None,
    say: Say,
) -> RestartRound | None:
    """Prepare the run directory for the next round; return None if no restart follows."""
    if not _may_restart(prepared.run_dir, outcome, say):
        return None
    made_no_progress = round_index > 0 and not made_progress(prepared.run_dir, round_index)
    reached_step = prepared.step if made_no_progress else last_step(prepared.run_dir / METRICS)
    all_nodes = [0] if launcher is None else launcher.nodes
    nodes = [node for node in all_nodes if node not in outcome.unreachable_nodes]
    config = settle_for_nodes(prepared, nodes, say, made_no_progress=made_no_progress)
    if config is None:
        return None
    state = inspect_run_dir(config, "auto", ignores_remote=True)
    prepare_restart(state, round_index + 1)
    previous = replace(state, previous_settings=to_settings(prepared.config))
    prepared.config, prepared.step = config, state.step
    ranks, lost_steps = config.launch.nproc_per_node, max(0, reached_step - state.step)
    assert ranks is not None
    say(
        f"restart {round_index + 1} of {prepared.launch.max_restarts}: {outcome.reason}; "
        f"{len(nodes) * ranks} ranks resume at step {state.step}, {lost_steps} steps lost"
    )
    for text in changed_settings(previous, config):
        say(f"{'changed':<8}{text}")
    # The workers record the restart after their first step.
    failed_at = outcome.failed_at or time.time()
    restart = Restart(round_index + 1, outcome.reason, failed_at, lost_steps)
    os.environ[RESTART_VARIABLE] = msgspec.json.encode(restart).decode()
    return RestartRound(nodes, ranks)


def _may_restart(run_dir: Path, outcome: RoundOutcome, say: Say) -> bool:
    cause = outcome.cause
    if not outcome.has_failed or outcome.stop_requested:
        return False
    if cause and (cause.exit_code in NO_RESTART or REMOVED_DURING_RUN in cause.message):
        return False
    if not (run_dir / RUN_CONFIG).is_file():
        return False  # deleted run directory: the command reports the failure
    if take_stop_request(run_dir):
        say(f"{run_dir}: no restart (stop requested)")
        return False
    return True


def made_progress(run_dir: Path, number: int) -> bool:
    """Return whether the ranks completed a step after restart `number`, the newest."""
    with suppress(UsageError):  # commands that need the file report that it is corrupted
        newest = read_start_events(run_dir)[-1:]
        return any(x.restart is not None and x.restart.number == number for x in newest)
    return False


def settle_for_nodes(
    prepared: PreparedRun, nodes: list[int], say: Say, *, made_no_progress: bool
) -> Resolved | None:
    """Settle the run for the remaining nodes, one rank fewer on each if it `made_no_progress`."""
    launch, ranks = prepared.launch, prepared.launch.nproc_per_node
    assert ranks is not None
    if len(nodes) < (least_nodes := launch.nnodes_min or launch.nnodes):
        remain = f"{len(nodes)} of {launch.nnodes} nodes remain"
        say(f"no restart: {remain}; launch.nnodes_min={least_nodes}")
        return None
    least = min(launch.nproc_min or ranks, ranks)
    most = max(ranks - 1, least) if made_no_progress else ranks
    problem = ""
    # A number of ranks may be invalid, such as one that does not divide the batch.
    for count in range(most, least - 1, -1):
        try:
            fewer = replace(launch, nnodes=len(nodes), nproc_per_node=count)
            return make_run_plan(prepared.first_plan.requested, launch=fewer).config
        except UsageError as error:
            problem = str(error)
    say(f"no restart with the remaining ranks: {problem}")
    return None
