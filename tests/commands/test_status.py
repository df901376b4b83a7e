"""`fsdpctl status`: the state of a run by its directory, which it only reads."""

import json
import os
import socket
import subprocess
import time
from dataclasses import asdict

import pytest

from fsdpctl.commands import status
from fsdpctl.commands.status import read_status
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.run_files import (
    CHECKPOINTS,
    ENVIRONMENT,
    HEARTBEAT,
    LOCK,
    LOGS,
    METRICS,
    RUN_CONFIG,
)
from fsdpctl.run.environment import add_start, write_start_events
from fsdpctl.run.heartbeat import HeartbeatRecord, pid_namespace, record_cause
from fsdpctl.run.metrics import MetricsLine
from tests.commands.run import invoke
from tests.fuzz.mutations import ODD
from tests.hostile import everything_in
from tests.run.runs import LONG_AGO, make_run, save, step_line, write_heartbeat, write_lines


def test_reading_the_status_writes_nothing(tmp_path):
    write_heartbeat(make_run(tmp_path / "run", done=3))
    before = everything_in(tmp_path)
    read_status(tmp_path / "run")
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(("options", "state"), [
    ({}, "running"),
    ({"step": None}, "starting"),
    ({"time": -80}, "running"),
    ({"time": -3600}, "failed"),
    ({"time": 5}, "running"),  # from a clock that is ahead
    ({"state": "stopped", "message": "stopped at step 3"}, "stopped"),
    ({"state": "failed", "message": "no room"}, "failed"),
])  # fmt: skip
def test_the_age_of_the_heartbeat_decides(tmp_path, options, state):
    run = make_run(tmp_path / "run", done=3)
    if "time" in options:  # from now
        options = {**options, "time": time.time() + options["time"]}
    record = write_heartbeat(run, **options)
    result = read_status(run)
    assert result.state == state
    assert result.message == (record.message or result.message)
    is_lost = state == "failed" and not record.message
    assert ("was killed or is unreachable" in result.message) == is_lost


def test_a_process_that_was_killed_on_this_host_is_killed_at_once(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    with subprocess.Popen(["true"]) as ended:
        pass
    here = {"pid": ended.pid, "namespace": pid_namespace()}
    write_heartbeat(run, **here)
    assert (read_status(run).state, read_status(run).message) == (
        "killed", f"process {ended.pid} on {socket.gethostname()}",
    )  # fmt: skip
    (run / LOCK).write_text(str(os.getpid()))  # the launcher restarts it
    assert read_status(run).state == "running"
    (run / LOCK).write_text("9" * 99)
    for other in ({"namespace": "other"}, {"host": "other"}, {"pid": os.getpid()}):
        write_heartbeat(run, **{**here, **other})
        assert read_status(run).state == "running"
    write_heartbeat(run, **here, state="ended")
    assert read_status(run).state != "killed"


def test_a_long_cause_is_cut_where_a_clause_ends(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    cause = f"rank 1 on vm: no connection to node 1; {'Read error at pair.cc:537 ' * 12}"
    write_heartbeat(run, state="failed", cause=cause)
    out = invoke("status", str(run))[1]
    assert f"state       failed: rank 1 on vm: no connection to node 1\nlog         {run}" in out
    assert json.loads(invoke("status", str(run), "--json")[1])["message"] == cause


def test_a_finished_run_is_one_whose_last_step_is_saved(tmp_path):
    run = make_run(tmp_path / "run", steps=3, done=3)
    write_heartbeat(run, state="ended", step=3)
    assert read_status(run).state == "failed"
    save(run, 3)
    assert read_status(run).state == "finished"
    write_heartbeat(run, step=3)  # validating, or waiting for a command
    assert read_status(run).state == "running"
    write_heartbeat(run, time=LONG_AGO, step=3)
    assert read_status(run).state == "finished"
    (run / RUN_CONFIG).write_text("train.steps: 4\n")
    assert read_status(run).state != "finished"


def test_a_failure_quotes_the_rank_that_wrote_first(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    write_heartbeat(run, state="failed", message="Connection closed by peer")
    for rank, text in ((0, "Connection closed by peer\n"), (1, "Traceback\n\nRuntimeError: x\n\n")):
        (run / LOGS / f"rank-{rank:05d}.log").write_text(text)
    os.utime(run / LOGS / "rank-00001.log", (1e9, 1e9))
    assert read_status(run).message == "rank-00001.log: RuntimeError: x"
    record_cause(run, "rank 2 on vm: killed by signal 9 (SIGKILL)")  # rank 2 has an empty log
    assert read_status(run).message == "rank 2 on vm: killed by signal 9 (SIGKILL)"


def test_a_run_that_was_just_started_is_starting(tmp_path):
    run = make_run(tmp_path / "run")
    assert read_status(run).state == "not started"
    os.utime(run / RUN_CONFIG)
    assert read_status(run).state == "starting"


def test_values_are_those_of_the_newest_steps(tmp_path):
    run = make_run(tmp_path / "run", steps=100, done=60)
    write_lines(run, {"step": 60, "val_loss": 0.25}, {"step": 60, "checkpoint_seconds": 1.0})
    write_lines(run, *(step_line(step) for step in (61, 62)))
    save(run, 50)
    save(run, 60)
    write_heartbeat(run, step=62, seconds_per_step=2.0)
    result = read_status(run)
    assert (result.step, result.total_steps, result.eta_seconds) == (62, 100, 76.0)
    assert (result.loss, result.tokens_per_second) == (1 / 62, 100 * (13 + 62) / 2)
    assert result.checkpoint is not None
    assert (result.checkpoint.step, result.checkpoint.problem) == (60, "")
    files = (run / CHECKPOINTS / "step-00000060").iterdir()
    tensors_and_attachments = sum(f.stat().st_size for f in files if f.name != "manifest.json")
    assert result.checkpoint.num_bytes == tensors_and_attachments
    assert 0 <= result.checkpoint.age_seconds < 600


def test_the_newest_warnings_and_incomplete_checkpoints_are_reported(tmp_path):
    run = make_run(tmp_path / "run", done=2)
    for n in range(3):
        texts = [f"step 5: no {3 * n + each}" for each in range(3)]
        add_start(run, {"record": {"warnings": texts}})
    (run / CHECKPOINTS / "step-00000005").mkdir()
    *quoted, incomplete = read_status(run).warnings
    assert quoted == [f"step 5: no {n}" for n in range(4, 9)]
    assert "step-00000005: incomplete" in incomplete


def test_the_speed_is_that_of_the_newest_start(tmp_path):
    run = make_run(tmp_path / "run", done=60)
    for begun in (0, 55, None):  # the last start has no step yet
        add_start(run, {"record": {"step": begun}})
    assert read_status(run).tokens_per_second == 100 * 58
    write_start_events(run, {"step": 60})
    assert read_status(run).tokens_per_second is None


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", steps=5000, done=3000)
    whole = read_status(run)
    monkeypatch.setattr(status, "_METRICS_BYTES", 20_000)
    result = read_status(run)
    assert (result.step, result.loss) == (3000, whole.loss)
    assert result.tokens_per_second == whole.tokens_per_second


def test_a_checkpoint_of_the_wrong_size_is_reported(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    with (save(run, 3) / "rank-00000.safetensors").open("ab") as file:
        file.write(b"x")
    result = read_status(run).checkpoint
    assert result is not None
    assert result.problem == "rank-00000.safetensors: missing or of the wrong size"


DAMAGE = {
    "no line": (METRICS, b'{"step": 1}\nnothing\n'), "another type": (METRICS, b'{"step": "1"}\n'),
    "not Unicode": (METRICS, b'{"step": 1, "rejected_step": "\xff"}\n'),
    "infinite": (METRICS, b'{"step": 1, "val_loss": 1e999}\n'),
    "deep": (METRICS, b'{"step": 1, "other": ' + b"[" * 9999 + b"]" * 9999 + b"}\n"),
    "another record": (ENVIRONMENT, b'{"starts": [{"record": {"step": -1}}]}'),
    "no heartbeat": (HEARTBEAT, b"{}"), "a large heartbeat": (HEARTBEAT, b" " * (1 << 17)),
    "starts of another type": (ENVIRONMENT, b'{"starts": [1]}'),
    "no configuration": (RUN_CONFIG, b"- 1"),
    "no number of steps": (RUN_CONFIG, b"train.steps: many"),
    "a number of steps that is too large": (RUN_CONFIG, b"train.steps: 1e300"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_a_corrupted_file_is_named_in_one_line(tmp_path, what):
    run = make_run(tmp_path / "run", done=3)
    name, content = DAMAGE[what]
    (run / name).write_bytes(content)
    with pytest.raises(UsageError, match=name) as caught:
        read_status(run)
    assert str(caught.value).startswith(str(run))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [METRICS, HEARTBEAT, ENVIRONMENT])
def test_only_files_of_the_run_are_opened(tmp_path, name):
    """tests/run/test_own_files.py tests pipes and links."""
    run = make_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    with pytest.raises(UsageError, match=name):
        read_status(run)


@pytest.mark.parametrize("field", [*HeartbeatRecord.__dataclass_fields__])
def test_any_value_in_a_heartbeat_is_shown_or_refused(tmp_path, field):
    run = make_run(tmp_path / "run", done=1)
    for value in ODD:
        record = json.loads(json.dumps(asdict(write_heartbeat(run))))
        (run / HEARTBEAT).write_text(json.dumps({**record, field: value}))
        code, out = invoke("status", str(run))
        assert code in (0, 2), out


@pytest.mark.parametrize("field", [*MetricsLine.__dataclass_fields__])
def test_any_value_in_metrics_is_shown_or_refused(tmp_path, field):
    run = make_run(tmp_path / "run", done=1)
    first = (run / METRICS).read_bytes()
    for value in (*map(json.dumps, ODD), "9" * 400, f'"{"x" * (1 << 21)}"'):
        line = json.dumps({**step_line(2), field: None})
        line = line.replace(f'"{field}": null', f'"{field}": {value}')
        (run / METRICS).write_bytes(first + line.encode() + b"\n")
        code, out = invoke("status", str(run))
        assert code in (0, 2), out


def test_many_incomplete_checkpoints_are_counted(tmp_path):
    run = make_run(tmp_path / "run", done=1)
    for step in range(1, 2001):
        (run / CHECKPOINTS / f"step-{step:08d}").mkdir()
    assert len(read_status(run).warnings) == 4
    assert read_status(run).warnings[-1].endswith("checkpoints: 1,997 more incomplete checkpoints")


def test_a_corrupted_manifest_is_named(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    (save(run, 3) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-00000003/manifest.json"):
        read_status(run)


def test_the_command_prints_a_table_or_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "one", steps=4, done=3)
    save(run, 2)
    add_start(run, {"record": {"warnings": ["odd \x1b[2J"]}})
    (tmp_path / "runs" / "latest").symlink_to("one")
    code, out = invoke("status")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert (code, rows["run"], rows["step"].startswith("3 of 4 (75.0%)")) == (0, "runs/one", True)
    assert rows["checkpoint"].startswith("step 2, 0:0")
    assert rows["checkpoint"].endswith("complete")
    assert "odd" in rows["warning"]
    assert "\x1b" not in out
    code, printed = invoke("status", str(run), "--json")
    content = json.loads(printed)
    assert (code, content["run"], content["step"]) == (0, str(run), 3)
    assert content["checkpoint"]["step"] == 2


def test_a_missing_run_is_one_line_with_suggestions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("status") == (2, "runs/latest: not found; pass a run directory")
    for number, name in enumerate(("b", "a", "latest")):  # a copy in place of the link
        os.utime(make_run(tmp_path / "runs" / name) / RUN_CONFIG, (number, number))
    code, out = invoke("status", "--json")
    assert (code, json.loads(out)["run"]) == (0, "runs/a")  # the run that started last
    code, out = invoke("status", "runs")
    assert (code, out) == (2, "runs: not a run of fsdpctl (config.yaml not found)")
    for command in ("status", "sample"):  # "runs" is no organization on the Hub
        code, out = invoke(command, "runs/other")
        assert (code, out[-49:]) == (2, "not found; expected a run, such as runs/a, runs/b")
