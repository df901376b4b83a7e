"""Stop, save and profile requests in every phase of a run."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.run import command, environment, figures, fsdpctl, make_text, run_args
from tests.commands.test_interruptions import ended, has_stepped, wait_for

pytestmark = pytest.mark.slow
LONG = 100_000

# Makes a phase slow; a file with its name shows that the run has come to it.
PLANTED = """
import os, time
if "RANK" in os.environ:
    from pathlib import Path
    from fsdpctl.training import trainer, validation_loss
    from fsdpctl.training.callbacks import checkpoints, generation

    SLOW = os.environ.get("SLOW", "")

    def slow(phase, seconds, where, name):
        before, count = getattr(where, name), 0

        def planted(*args, **about):
            nonlocal count
            count += 1
            if SLOW == phase and count > int(os.environ.get("SKIP", 0)):
                Path(f"came-to-{phase}").touch()
                time.sleep(seconds)
            return before(*args, **about)

        setattr(where, name, planted)

    slow("validation", 1.5, validation_loss, "_pass_loss")
    slow("sample", 0.3, generation, "sample_token")
    slow("first step", 3600, trainer, "launch_step")
    slow("step", 3, trainer, "launch_step")
    slow("save", 3, checkpoints, "write_checkpoint")
"""


class Run:
    """A run of a tiny model in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dir = folder, folder / "run"
        self.process: subprocess.Popen[str] | None = None
        (folder / "planted").mkdir()
        (folder / "planted" / "sitecustomize.py").write_text(PLANTED)
        make_text(folder)

    def start(self, steps: int, *more: str, slow: str = "", skip: int = 0) -> subprocess.Popen[str]:
        paths = f"{self.folder / 'planted'}:{environment()['PYTHONPATH']}"
        self.process = subprocess.Popen(
            command("train", *run_args(self.folder, steps, *more)), cwd=self.folder, text=True,
            env={**environment(), "PYTHONPATH": paths, "SLOW": slow, "SKIP": str(skip)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return self.process

    def has_come_to(self, phase: str) -> Callable[[], object]:
        return (self.folder / f"came-to-{phase}").exists

    def checkpoints(self) -> list[str]:
        return sorted(each.name for each in (self.dir / "checkpoints").glob("step-*"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Make a run, and kill it if a test fails."""
    run_ = Run(tmp_path)
    yield run_
    if run_.process is not None:
        run_.process.kill()
        run_.process.communicate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float | None, float | None]]:
    """Return the values of 40 undisturbed steps."""
    run = Run(tmp_path_factory.mktemp("whole"))
    code, out = ended(run.start(40))
    assert code == 0, out
    return figures(run.dir)


def request_stop(way: str, run: Run, process: "subprocess.Popen[str]") -> None:
    if way == "file":
        (run.dir / "STOP").touch()
    else:
        process.send_signal(signal.Signals[way])


WAYS = pytest.mark.parametrize("way", ["SIGTERM", "file"])


@WAYS
@pytest.mark.parametrize("last", [False, True])
def test_a_stopped_validation_is_done_by_the_next_start(run, whole, way, last):
    process = run.start(40, slow="validation", skip=3 if last else 0)  # 3 batches in each
    wait_for(run.has_come_to("validation"))
    request_stop(way, run, process)
    code, out = ended(process)
    step = 40 if last else 20
    assert code == 75, out
    assert re.search(rf"step {step}: validation stopped after \d of 3 batches \(stop req", out)
    assert f"stopped at step {step} of 40, saved" in out
    assert "its validation is pending" in out
    assert f"step-{step:08d}" in run.checkpoints()
    assert not (run.dir / "STOP").exists()
    code, out = ended(run.start(40))
    assert (code, f"step {step}: validation loss" in out) == (0, True), out
    assert figures(run.dir) == whole
    code, out = ended(run.start(40))
    assert (code, "finished at step 40; nothing to do" in out) == (0, True), out


def test_a_stop_request_before_a_validation_skips_it(run, whole):
    process = run.start(40, slow="step", skip=19)
    wait_for(run.has_come_to("step"))
    process.terminate()
    code, out = ended(process)
    assert (code, "step 20: validation skipped (stop requested)" in out) == (75, True), out
    assert "stopped at step 20 of 40, saved; its validation is pending" in out
    code, out = ended(run.start(40))
    assert (code, figures(run.dir)) == (0, whole), out


@WAYS
def test_a_stop_request_shortens_the_sample_and_the_run_is_complete(run, way):
    process = run.start(10, "train.sample_tokens=500", slow="sample", skip=3)
    wait_for(run.has_come_to("sample"))
    request_stop(way, run, process)
    code, out = ended(process)
    assert (code, "done: run" in out) == (0, True), out
    assert re.search(r"sample stopped after \d+ of 500 tokens \(stop requested\)", out)
    assert ((run.dir / "STOP").exists(), run.checkpoints()[-1]) == (False, "step-00000010")


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "file", "time limit"])
@pytest.mark.parametrize("resumed", [False, True])
def test_before_the_first_step_a_stop_request_ends_the_run_at_once(run, way, resumed):
    if resumed:
        code, out = ended(run.start(10))
        assert code == 0, out
    more = ["launch.time_limit=12"] if way == "time limit" else []
    process = run.start(40, *more, slow="first step")
    began = time.monotonic()
    if way != "time limit":
        wait_for(run.has_come_to("first step"))
        began = time.monotonic()
        request_stop(way, run, process)
    code, out = ended(process)
    assert code == (130 if way == "SIGINT" else 75), out
    assert "stopped before there was anything to save" in out
    assert time.monotonic() - began < (60 if way == "time limit" else 15)
    assert not (run.dir / "STOP").exists()
    assert run.checkpoints() == (["step-00000010"] if resumed else [])


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "file"])
def test_a_save_at_the_end_is_completed(run, way):
    process = run.start(10, slow="save")
    wait_for(run.has_come_to("save"))
    request_stop(way, run, process)
    code, out = ended(process)
    assert (code, "done: run" in out) == (0, True), out
    assert (run.checkpoints(), (run.dir / "STOP").exists()) == (["step-00000010"], False)


def test_a_save_request_saves_and_the_run_continues(run):
    process = run.start(LONG, "checkpoint.every=0")
    wait_for(has_stepped(run.folder))
    (run.dir / "SAVE").touch()
    wait_for(lambda: not (run.dir / "SAVE").exists())
    (saved,) = run.checkpoints()
    manifest = json.loads((run.dir / "checkpoints" / saved / "manifest.json").read_text())
    assert manifest["progress"]["step"] >= 30
    wait_for(has_stepped(run.folder, int(saved[5:]) + 20))
    process.terminate()
    assert ended(process)[0] == 75


def test_a_save_request_saves_during_a_validation(run):
    process = run.start(40, "checkpoint.every=0", slow="validation")
    wait_for(run.has_come_to("validation"))
    (run.dir / "SAVE").touch()
    wait_for(lambda: not (run.dir / "SAVE").exists())
    assert "val_loss" not in (run.dir / "metrics.jsonl").read_text()
    assert run.checkpoints() == ["step-00000020"]
    code, out = ended(process)
    assert (code, "step 20: validation loss" in out) == (0, True), out


def test_a_profile_request_traces_a_running_run(run):
    process = run.start(LONG, slow="save")
    for _ in range(2):
        before = list((run.dir / "profile").glob("*")) if (run.dir / "profile").exists() else []
        wait_for(has_stepped(run.folder))
        (run.dir / "PROFILE").touch()
        wait_for(lambda: not (run.dir / "PROFILE").exists())
        files = [each for each in (run.dir / "profile").iterdir() if each not in before]
        assert sorted(each.name[-6] for each in files) == ["0", "1"]  # ranks
        for file in files:
            names = [each["name"] for each in json.loads(file.read_text())["traceEvents"]]
            assert names.count("forward model.layers.0") == 3
    process.terminate()
    assert ended(process)[0] == 75


def test_requests_from_before_the_start_are_removed(run):
    assert ended(run.start(10))[0] == 0
    for name in ("STOP", "SAVE", "PROFILE"):
        (run.dir / name).touch()
    time.sleep(0.05)
    code, out = ended(run.start(20))
    assert code == 0, out
    for name in ("STOP", "SAVE", "PROFILE"):
        assert f"{name}: request removed (from before this start)" in out
        assert not (run.dir / name).exists()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_time_limit_is_kept_with_all_that_is_saved(run, mode, monkeypatch):
    """Each save takes three seconds, so that the last save must begin three seconds early."""
    began = time.time()
    assert ended(run.start(10))[0] == 0
    limit = int(2 * (time.time() - began)) + 20
    began = time.time()
    monkeypatch.setenv("FSDPCTL_STARTED", str(began))
    more = [f"launch.time_limit={limit}", f"checkpoint.mode={mode}", "checkpoint.every=100"]
    code, out = ended(run.start(LONG, *more, slow="save"), 2 * limit)
    took = time.time() - began
    assert (code, f"saved; launch.time_limit={limit} is near" in out) == (75, True), out
    assert limit / 2 < took < limit
    step = figures(run.dir)[-1][0]
    assert run.checkpoints()[-1] == f"step-{step:08d}"


def test_non_finite_steps_exit_with_76(tmp_path):
    run = Run(tmp_path)
    more = ["optimizer.lr=1e30", "lr_scheduler.warmup_steps=0", "optimizer.max_grad_norm=0"]
    for action, advice in (("stop", "train.on_nonfinite=skip"), ("skip", "train.max_skips=3")):
        options = [
            "train.max_skips=3",
            f"train.on_nonfinite={action}",
            f"train.run_dir=of-{action}",
        ]
        result = fsdpctl("train", *run_args(run.folder, 40, *more, *options), cwd=tmp_path)
        assert (result.returncode, advice in result.stderr) == (76, True), result.stderr
        assert os.path.exists(tmp_path / f"of-{action}" / "metrics.jsonl")
