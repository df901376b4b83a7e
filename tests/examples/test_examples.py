"""The examples for clusters: their commands are accepted."""

import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdpctl.config.compose import compose_config
from fsdpctl.errors import DoesNotFitError, NonFiniteError, SelfCheckError, StoppedError, UsageError
from fsdpctl.resolve.launchers import role_of
from tests.commands.run import invoke

_FINAL = (UsageError, DoesNotFitError, NonFiniteError, SelfCheckError)  # a restart would fail too
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
OTHERS = Path(__file__).parent.parent / "importers" / "files"

# Variables that a cluster sets on the second of two nodes.
_VARIABLES = {
    "skypilot/train.yaml": {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "sky-1_my-run",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    },
    "kubernetes/job.yaml": {"JOB_COMPLETION_INDEX": "1"},
}  # fmt: skip


def documents(example: str) -> list[Any]:
    """Return the YAML documents of an example."""
    return list(yaml.safe_load_all((EXAMPLES / example).read_text()))


def test_rented_nodes_install_what_they_are_given() -> None:
    """No index has the package."""
    (task,) = documents("skypilot/train.yaml")
    assert (task["workdir"], task["setup"].strip()) == (".", "pip install .")


def test_every_example_is_tried() -> None:
    assert {f"{each.parent.name}/{each.name}" for each in EXAMPLES.glob("*/*.y*ml")} == {
        *_VARIABLES, "ci/memory.yaml",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_the_check_of_a_repository_fails_as_its_command_does(code: int, tmp_path: Path) -> None:
    *_, step = documents("ci/memory.yaml")[0]["jobs"]["fits"]["steps"]
    program = tmp_path / "fsdpctl"
    program.write_text(f"#!/bin/sh\necho $@\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_STEP_SUMMARY": "summary.md"}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]  # `shell: bash`
    done = subprocess.run([*shell, step["run"]], cwd=tmp_path, env=environment, check=False)
    summary = (tmp_path / "summary.md").read_text().split()
    assert (done.returncode, summary[0]) == (code, "estimate-memory")
    shutil.copytree(OTHERS, tmp_path / "recipes")
    summary[summary.index("recipes")] = str(tmp_path / "recipes")
    summary[summary.index("cluster=8xh100")] = "cluster=rtx4090"
    exit_code, output = invoke(*summary)
    assert (exit_code, "axolotl-full.yaml" in output) == (3, True)


def _policies(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [policy for each in value for policy in _policies(each)]
    if not isinstance(value, dict):
        return []
    policies = [value["podFailurePolicy"]] if "podFailurePolicy" in value else []
    return policies + [policy for each in value.values() for policy in _policies(each)]


def test_the_exit_codes_in_the_examples_are_those_of_the_errors() -> None:
    again = [StoppedError.exit_code]
    never = sorted(each.exit_code for each in _FINAL)
    (policy,) = _policies(documents("kubernetes/job.yaml"))
    rules = [rule for rule in policy["rules"] if "onExitCodes" in rule]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
    assert codes == {"Ignore": again, "FailJob": never}
    (task,) = documents("skypilot/train.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == again


def _scripts(value: Any) -> list[str]:
    """Return the texts that contain a training command, at any depth."""
    if isinstance(value, str):
        return [value] if "fsdpctl train" in value else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [script for each in inner for script in _scripts(each)]


def _arguments(example: str, folder: Path) -> list[str]:
    """Return fsdpctl's arguments: run the example's script with a program of that name."""
    for name, script in {"fsdpctl": 'printf "%s\\n" "$@" > arguments', "getent": "true"}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (script,) = _scripts(documents(example))
    shell = "bash" if example.startswith("skypilot") else "sh"  # the shell that the cluster uses
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **_VARIABLES[example]}
    subprocess.run([shell, "-ec", script], cwd=folder, env=environment, check=True, timeout=20)
    return (folder / "arguments").read_text().splitlines()


@pytest.mark.parametrize("example", _VARIABLES)
def test_the_commands_get_their_node_from_the_cluster(example: str, tmp_path: Path) -> None:
    command, *args = _arguments(example, tmp_path)
    assert (command, args[:2]) == ("train", ["--recipe", "llama3_8b_8xh100"])
    role = role_of(compose_config(args[2:]).config.launch, _VARIABLES[example])
    launch, rank = role.launch, role.rank
    assert launch is not None
    assert (launch.nnodes, launch.node_rank, rank) == (2, 1, None)
    host, _, port = str(launch.rdzv_endpoint).rpartition(":")
    assert host in ("10.0.0.1", "fsdpctl-0.fsdpctl")
    assert port.isdigit()


@pytest.mark.slow
@pytest.mark.parametrize("example", _VARIABLES)
def test_the_commands_pass_a_dry_run(example, tmp_path, monkeypatch):
    args = _arguments(example, tmp_path)
    for name, value in _VARIABLES[example].items():
        monkeypatch.setenv(name, value)
    # The recipe's model needs devices that are not here. The directory must be writable.
    run_dir = f"train.run_dir={tmp_path / 'run'}"
    changed = [run_dir if each.startswith("train.run_dir=") else each for each in args]
    here = ("launch.nproc_per_node=8", "launch.device=cpu", "train.require_fit=false")
    code, output = invoke(*changed, "--dry-run", *here)
    assert (code, "16 ranks" in output) == (0, True), shlex.join(changed) + output
