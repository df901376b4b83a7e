"""What the command line imports, and what it computes: counted, never timed."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from fsdpctl.commands.app import COMMANDS
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.estimate.advice import advice
from fsdpctl.estimate.estimator import Estimator, plan_for_estimate
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.resolve.settle import RunPlan
from tests.commands.run import environment
from tests.hostile import make_checkpoint
from tests.run.runs import make_run

SLOW = {"torch", "numpy", "hydra", "omegaconf", "yaml", "rich", "psutil", "msgspec"}
OWN = {
    "fsdpctl", "fsdpctl.__main__", "fsdpctl.commands", "fsdpctl.commands.app", "fsdpctl.errors",
    "fsdpctl.io", "fsdpctl.io.activity", "fsdpctl.io.texts",
}  # fmt: skip


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that a command imports, without those of its interpreter."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['fsdpctl', *{arguments}]\n"
        "try:\n    runpy.run_module('fsdpctl', run_name='__main__', alter_sys=True)\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_the_command_line_only():
    found = imported_by("--help")
    own = {each for each in found if each.split(".")[0] == "fsdpctl"}
    assert {"fsdpctl.commands.app"} <= own <= OWN
    assert found & SLOW == set()


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


def test_advice_estimates_no_settings_together_if_one_suffices(monkeypatch):
    """Each estimate of a large model takes as long as a start."""
    plan = plan_for_estimate(
        compose_config(
            ["model=llama3_405b", "cluster=h100", "launch.nproc_per_node=8", "launch.nnodes=2048"]
        )
    )
    estimator = Estimator()
    estimated: list[Config] = []
    assert estimator.estimate(plan).verdict == "too_large"
    estimate = estimator.estimate

    def counted(plan: RunPlan) -> RunEstimate:
        estimated.append(plan.config)
        return estimate(plan)

    monkeypatch.setattr(estimator, "estimate", counted)
    (found, _), *_ = advice(estimator, plan)
    assert found.words == ("activation_checkpointing=full",)
    compressed = [each for each in estimated if each.optimizer.state_dtype == "int8"]
    assert {each.activation_checkpointing.name for each in compressed} == {"none"}
    assert len(estimated) <= 7
