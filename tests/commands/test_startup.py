"""Imports and computations of a command and of a start: counted, never timed."""

import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType

import pytest

from fsdpctl.commands.app import COMMANDS
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.errors import DoesNotFitError, UsageError
from fsdpctl.estimate import estimator
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.suggestions import suggest
from fsdpctl.io.activity import Reporter
from fsdpctl.launch import restarts
from fsdpctl.launch.outcome import RoundOutcome
from fsdpctl.launch.prepare_run import PreparedRun, prepare_run
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan
from fsdpctl.run.directory import read_config
from tests.commands.run import environment, make_text
from tests.hostile import make_checkpoint
from tests.run.runs import make_run

SLOW = {"torch", "numpy", "hydra", "omegaconf", "yaml", "rich", "psutil", "msgspec"}
OWN = {
    "fsdpctl", "fsdpctl.__main__", "fsdpctl.commands", "fsdpctl.commands.app", "fsdpctl.errors",
    "fsdpctl.io", "fsdpctl.io.activity", "fsdpctl.io.output", "fsdpctl.io.texts",
}  # fmt: skip


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that a command imports, except for those of the interpreter."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['fsdpctl', *{arguments}]\n"
        "try:\n    runpy.run_module('fsdpctl', run_name='__main__', alter_sys=True)\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)"
    )
    typed = [sys.executable, "-c", code]
    done = subprocess.run(typed, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_the_command_line_only():
    modules = imported_by("--help")
    own_modules = {each for each in modules if each.split(".")[0] == "fsdpctl"}
    assert {"fsdpctl.commands.app"} <= own_modules <= OWN
    assert modules & SLOW == set()


@pytest.mark.parametrize("command", ["status", "inspect-checkpoint", "verify-checkpoint"])
def test_looking_at_a_run_imports_no_torch(tmp_path, command):
    run = make_run(tmp_path / "run", done=3)
    make_checkpoint(run / "checkpoints" / "step-00000003")
    assert "torch" not in imported_by(command, str(run))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_repeats_what_each_says(name):
    info = COMMANDS[name]
    module = import_module(f"fsdpctl.commands.{info.module}")
    function = getattr(module, info.function or name.replace("-", "_"))
    assert info.help == (inspect.getdoc(function) or "").splitlines()[0]
    assert len(info.help) <= 50


@pytest.mark.slow
def test_advice_estimates_no_settings_together_if_one_suffices(monkeypatch):
    """Each estimate of a large model takes as long as a start."""
    plan = make_run_plan(prepare(compose_config(
        ["model=llama3_405b", "cluster=h100", "launch.nproc_per_node=8", "launch.nnodes=2048"]
    ), ESTIMATE_ROLE).config)  # fmt: skip
    estimator = Estimator()
    estimated: list[Config] = []
    assert estimator.estimate(plan).verdict == "too_large"
    estimate = estimator.estimate

    def counted(plan: RunPlan) -> RunEstimate:
        estimated.append(plan.config)
        return estimate(plan)

    monkeypatch.setattr(estimator, "estimate", counted)
    (suggestions, _), *_ = suggest(estimator, plan)
    assert suggestions.settings == ("activation_checkpointing=full",)
    compressed = [each for each in estimated if each.optimizer.state_dtype == "int8"]
    assert {each.activation_checkpointing.name for each in compressed} == {"none"}
    assert len(estimated) <= 7


SMALL = [
    "data=text", "model.num_layers=2", "launch.device=cpu", "launch.nproc_per_node=2",
    "launch.nproc_min=1",
]  # fmt: skip
QUIET = Reporter(*[lambda line: None] * 3)
PACKAGE = str(Path(prepare_run.__code__.co_filename).parent.parent)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Call `run`; return the calls of the package's functions, by name."""
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_a_start_opens_data_traces_and_chooses_once_and_a_restart_never(tmp_path, monkeypatch):
    estimator._traced_models.clear()
    args = [*SMALL, f"data.path={make_text(tmp_path)}", "train.run_dir=run", "strategy=auto"]
    composed = compose_config(args)
    started: list[PreparedRun | None] = []
    calls = calls_of(lambda: started.append(prepare_run(composed, args, "auto", QUIET)))
    begun = started[0]
    assert begun is not None
    begun.lock.release()
    assert (calls["open_data"], calls["trace"], calls["rank_candidates"]) == (1, 1, 1)
    assert calls["role_of"] == 1  # reads the launcher's variables
    following: list[Config | None] = []
    calls = calls_of(
        lambda: following.append(
            restarts.settle_for_nodes(begun, [0], QUIET.result, made_no_progress=True)
        )
    )
    assert following[0] is not None
    assert following[0].launch.nproc_per_node == 1
    assert following[0].train.global_batch_size == begun.config.train.global_batch_size
    assert not {"open_data", "trace", "rank_candidates", "build_model"} & set(calls)


def test_a_restart_on_fewer_ranks_prints_what_changed_and_a_start_by_hand_what_you_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*SMALL, f"data.path={make_text(tmp_path)}", "train.run_dir=run", "train.steps=9"]
    args += ["launch.max_restarts=2", "train.micro_batch_size=4"]
    fewer = ["launch.nproc_per_node was 2, is 1", "accumulation.steps was 2, is 4"]

    def started(ranks: int) -> tuple[PreparedRun, list[str]]:
        messages: list[str] = []
        typed = [arg.replace("per_node=2", f"per_node={ranks}") for arg in args]
        reporter = Reporter(messages.append, print, messages.append)
        begun = prepare_run(compose_config(typed), typed, "auto", reporter)
        assert begun is not None
        begun.lock.release()
        return begun, changed_in(messages)

    begun, _ = started(2)
    message: list[str] = []
    hung = RoundOutcome((), None, hang="no progress")
    for number in range(2):  # no step between the two restarts
        assert restarts._next_round(begun, hung, number, None, message.append) is not None
    assert (changed_in(message), read_config(tmp_path / "run").launch.nproc_per_node) == (fewer, 1)
    assert (started(2)[1], started(1)[1], started(1)[1]) == ([], fewer, [])


def changed_in(lines: list[str]) -> list[str]:
    results = [line.removeprefix("changed ") for line in lines if line.startswith("changed ")]
    return sorted(results, reverse=True)


def test_a_start_that_fails_leaves_no_directory_and_no_lock(tmp_path, monkeypatch):
    there = tmp_path / "there"
    there.mkdir()
    args = [*SMALL, f"data.path={make_text(tmp_path)}", "strategy=auto", "cluster.memory=0.2"]
    for run_dir in ("some/new/run", "there"):
        composed = compose_config([*args, f"train.run_dir={run_dir}"])
        lines: list[str] = []
        with pytest.raises(DoesNotFitError, match="204.8 MiB available; change the settings"):
            prepare_run(composed, args, "auto", Reporter(lines.append, lines.append, lines.append))
        assert any("nothing fits; closest is strategy=" in line for line in lines)
        assert any(line.startswith("to fit  ") for line in lines)
    assert ((tmp_path / "some").exists(), list(there.iterdir())) == (False, [])


def test_a_run_in_use_is_rejected_before_anything_is_selected(tmp_path, monkeypatch):
    args = [*SMALL, f"data.path={make_text(tmp_path)}", "train.run_dir=run", "strategy=auto"]
    begun = prepare_run(compose_config(args), args, "auto", QUIET)
    assert begun is not None
    monkeypatch.setattr("fsdpctl.estimate.resolve_auto.resolve_auto", None)
    with pytest.raises(UsageError, match="in use by a running launcher"):
        prepare_run(compose_config(args), args, "auto", QUIET)
    assert (tmp_path / "run" / "config.yaml").is_file()
    begun.lock.release()
