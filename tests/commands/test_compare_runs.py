"""Two runs side by side."""

import json
import shutil
from pathlib import Path

import pytest

from fsdpctl.commands.compare_runs import compare_run_dirs
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


@pytest.mark.parametrize(("of_a", "of_b", "differ"), [
    ([], [], []), ([step_line(4, loss=None)], [step_line(4, loss=None)], []),  # not finite
    ([], [step_line(3, loss=7.0), step_line(3)], []),  # the last values of a repeated step count
    ([], [step_line(4), step_line(5)], ["2 steps in one run only"]),
    ([], [step_line(2, loss=0.5001), step_line(3, loss=9.0)],
     ["loss from step 2 on (0.5 and 0.5001)"]),
    ([step_line(5, loss=None)], [step_line(5)], ["loss from step 5 on (not finite and 0.2)"]),
    ([step_line(3, loss=2.0)], [step_line(3, loss=2.0 + 1e-12)],
     ["loss from step 3 on (2.0 and 2.000000000001)"]),  # all digits that differ
    ([], [{"step": 3, "val_loss": 0.75}], ["val_loss from step 3 on (0.5 and 0.75)"]),
])  # fmt: skip
def test_the_first_step_whose_losses_differ_is_named(run, twin, of_a, of_b, differ):
    for folder, lines in ((run, of_a), (twin, of_b)):
        write_lines(folder, *lines)
    comparison = compare_run_dirs(run, twin)
    assert (comparison["differences"], comparison["configuration"]) == (differ, [])
    assert (comparison["loss"]["compared"] >= 3, comparison["val_loss"]["compared"]) == (True, 1)
    assert comparison["loss"]["only_in_one"] == len(of_b) * ("only" in str(differ))
    assert comparison["grad_norm"]["first"] is None


def test_different_settings_are_reported_but_do_not_count(run, twin):
    (twin / "config.yaml").write_text("train.steps: 200\ntrain.seed: 1\ntrain.run_dir: x\n")
    comparison = compare_run_dirs(run, twin)
    differences = {each["key"]: (each["a"], each["b"]) for each in comparison["configuration"]}
    assert differences == {"train.steps": ("100", "200"), "train.seed": (None, "1")}
    assert comparison["differences"] == []


def test_the_environments_of_the_newest_starts_are_compared(run, twin):
    for folder, version in ((run, "2.12"), (twin, "2.13")):
        add_start(folder, {"started": "before", "torch": "2.0"})
        environment = {"torch": version, "variables": {"SAME": "1", "OTHER": version}}
        add_start(folder, {"started": version, **environment, "devices": {"X": 4}})
    comparison = compare_run_dirs(run, twin)
    differ = [(each["key"], each["a"], each["b"]) for each in comparison["environment"]]
    assert differ == [("torch", "2.12", "2.13"), ("variables.OTHER", "2.12", "2.13")]
    assert comparison["differences"] == []
    assert "2.13" in invoke("compare-runs", str(run), str(twin))[1]


def test_a_corrupted_line_is_named_and_an_incomplete_last_line_is_skipped(run, twin):
    with (twin / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    assert compare_run_dirs(run, twin)["differences"] == []
    with (twin / METRICS).open("a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match=r"twin/metrics\.jsonl, line 5: corrupted"):
        compare_run_dirs(run, twin)


def test_a_directory_that_is_not_a_run_is_rejected(run, tmp_path):
    with pytest.raises(UsageError, match="not a run of fsdpctl"):
        compare_run_dirs(run, tmp_path)


def test_the_command_prints_a_table_and_sets_the_exit_code(run, twin):
    args = ["compare-runs", str(run), str(twin)]
    code, text = invoke(*args, "--assert-equal")
    assert code == 0
    for part in ("loss", "equal", "configurations are equal", "environments are equal"):
        assert part in text
    write_lines(twin, step_line(3, loss=2.0))
    code, text = invoke(*args)
    assert (code, "step 3: 0.333333333 and 2" in text) == (0, True)
    code, out = invoke(*args, "--assert-equal")
    assert (code, "\n" in out, "loss from step 3 on" in out) == (1, False, True)
    code, text = invoke(*args, "--json")
    content = json.loads(text)
    assert (code, content["equal"]) == (0, False)
    assert (content["loss"]["first"], content["environment"]) == (
        {"step": 3, "a": 1 / 3, "b": 2.0},
        [],
    )
