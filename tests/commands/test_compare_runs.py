"""Two runs side by side."""

import json
import shutil
from pathlib import Path

import pytest

from fsdpctl.commands.compare_runs import compared_runs
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import METRICS
from fsdpctl.run.environment import add_start
from tests.commands.run import invoke
from tests.run.runs import make_run, step_line, write_lines


@pytest.fixture
def run(tmp_path):
    """Three steps and a validation."""
    folder = make_run(tmp_path / "run", done=3)
    write_lines(folder, {"step": 3, "val_loss": 0.5})
    return folder


@pytest.fixture
def twin(run):
    return Path(shutil.copytree(run, run.with_name("twin"), symlinks=True))


def test_a_run_is_equal_to_its_copy(run, twin):
    found = compared_runs(run, twin)
    assert found["differences"] == []
    assert found["configuration"] == []
    assert found["loss"]["compared"] == 3
    assert found["val_loss"]["compared"] == 1


def test_the_first_difference_of_losses_is_reported(run, twin):
    (twin / METRICS).unlink()
    changed = {2: 0.5001, 3: 9.0}
    lines = [step_line(n, **({"loss": changed[n]} if n in changed else {})) for n in (1, 2, 3)]
    write_lines(twin, *lines, {"step": 3, "val_loss": 0.5})
    found = compared_runs(run, twin)
    assert found["loss"]["first"] == {"step": 2, "a": 0.5, "b": 0.5001}
    assert found["grad_norm"]["first"] is None
    assert found["differences"] == ["loss from step 2 on (0.5 and 0.5001)"]


def test_steps_in_one_run_only_are_a_difference(run, twin):
    write_lines(twin, step_line(4), step_line(5))
    found = compared_runs(run, twin)
    assert found["loss"]["only_in_one"] == 2
    assert found["differences"] == ["2 steps in one run only"]


def test_a_non_finite_loss_differs_from_a_finite_one_only(run, twin):
    for folder, loss in ((run, None), (twin, None)):
        write_lines(folder, step_line(4, loss=loss))
    assert compared_runs(run, twin)["differences"] == []
    write_lines(run, step_line(5, loss=None))
    write_lines(twin, step_line(5))
    (said,) = compared_runs(run, twin)["differences"]
    assert said == "loss from step 5 on (not finite and 0.2)"
    _, printed = invoke("compare-runs", str(run), str(twin), "--json")
    assert json.loads(printed)["loss"]["first"] == {"step": 5, "a": None, "b": 0.2}


def test_the_last_values_of_a_repeated_step_count(run, twin):
    write_lines(twin, step_line(3, loss=7.0), step_line(3))
    assert compared_runs(run, twin)["differences"] == []
    write_lines(run, step_line(3, loss=2.0))
    write_lines(twin, step_line(3, loss=2.0 + 1e-12))
    (said,) = compared_runs(run, twin)["differences"]  # with the digits in which they differ
    assert said == "loss from step 3 on (2.0 and 2.000000000001)"


def test_different_settings_are_reported_but_do_not_count(run, twin):
    (twin / "config.yaml").write_text("train.steps: 200\ntrain.seed: 1\ntrain.run_dir: x\n")
    found = compared_runs(run, twin)
    told = {each["key"]: (each["a"], each["b"]) for each in found["configuration"]}
    assert told == {"train.steps": ("100", "200"), "train.seed": (None, "1")}
    assert found["differences"] == []


def test_the_environments_of_the_newest_starts_are_compared(run, twin):
    for folder, version in ((run, "2.12"), (twin, "2.13")):
        add_start(folder, {"started": "before", "torch": "2.0"})
        own = {"torch": version, "variables": {"SAME": "1", "OTHER": version}}
        add_start(folder, {"started": version, **own, "devices": {"X": 4}})
    found = compared_runs(run, twin)
    differ = [(each["key"], each["a"], each["b"]) for each in found["environment"]]
    assert differ == [("torch", "2.12", "2.13"), ("variables.OTHER", "2.12", "2.13")]
    assert found["differences"] == []
    assert "2.13" in invoke("compare-runs", str(run), str(twin))[1]


def test_a_corrupted_line_is_named_and_an_incomplete_last_line_is_skipped(run, twin):
    with (twin / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    assert compared_runs(run, twin)["differences"] == []
    with (twin / METRICS).open("a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match=r"twin/metrics\.jsonl, line 5: corrupted"):
        compared_runs(run, twin)


def test_a_directory_that_is_not_a_run_is_rejected(run, tmp_path):
    with pytest.raises(UsageError, match="not a run of fsdpctl"):
        compared_runs(run, tmp_path)


def test_the_command_prints_a_table_and_sets_the_exit_code(run, twin):
    words = ["compare-runs", str(run), str(twin)]
    code, text = invoke(*words, "--assert-equal")
    assert code == 0
    for part in ("loss", "equal", "configurations are equal", "environments are equal"):
        assert part in text
    write_lines(twin, step_line(3, loss=2.0))
    code, text = invoke(*words)
    assert code == 0
    assert "step 3: 0.333333333 and 2" in text
    code, said = invoke(*words, "--assert-equal")
    assert code == 1
    assert "\n" not in said
    assert "loss from step 3 on" in said
    code, text = invoke(*words, "--json")
    found = json.loads(text)
    assert (code, found["equal"]) == (0, False)
    assert found["loss"]["first"] == {"step": 3, "a": 1 / 3, "b": 2.0}
    assert found["environment"] == []
