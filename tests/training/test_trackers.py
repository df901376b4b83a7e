"""Trackers of a run; the real programs if they are installed."""

import json
import sys
import threading
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.launch import EngineConfig
from fsdpctl.config.schema import Config
from fsdpctl.config.training import TRACKERS, LogConfig
from fsdpctl.errors import UsageError
from fsdpctl.io import packages
from fsdpctl.io.run_files import METRICS, TENSORBOARD, TRACKER_ID
from fsdpctl.resolve.rules import check_preflight
from fsdpctl.run.metrics import MetricsFile
from fsdpctl.training import trackers
from fsdpctl.training.trackers import Trackers

LINE = {"step": 3, "loss": 0.5, "mfu": None, "state": "done", "tokens": 7, "flag": True}


def configured(*names: str) -> Config:
    return replace(Config(), log=LogConfig(trackers=",".join(names), project="mine"))


BOTH = configured("tensorboard", "wandb")


class FakeTracker:
    """A tracker that collects its calls and has already stored the loss of the steps `stored`."""

    def __init__(self) -> None:
        self.fails_at = ""
        self.stored: Container[int] = ()
        self.calls: list[Any] = []

    def is_stored(self, step: int, name: str) -> bool:
        return step in self.stored

    def log(self, step: int, figures: Any) -> None:
        self.calls.append((step, dict(figures)))
        if self.fails_at == "log":
            raise RuntimeError("lost the\nconnection")

    def close(self, *, succeeded: bool) -> None:
        self.calls.append("closed")
        if self.fails_at == "close":
            raise RuntimeError("lost")


@pytest.fixture
def tools(monkeypatch):
    """Two trackers, of which a test may let the second fail."""
    one, other = FakeTracker(), FakeTracker()
    monkeypatch.setitem(trackers._TRACKERS, "tensorboard", lambda *about: one)
    monkeypatch.setitem(trackers._TRACKERS, "wandb", lambda *about: other)
    return one, other


def test_trackers_get_the_numbers_of_each_line(tmp_path, tools):
    both = Trackers(BOTH, tmp_path, 0, pytest.fail)
    both.log_line(LINE)
    both.log_line({"step": 4, "warning": "odd"})
    both.close(succeeded=True)
    assert [each.calls for each in tools] == [[(3, {"loss": 0.5, "tokens": 7}), "closed"]] * 2


def test_values_that_a_tracker_has_stored_before_a_resume_are_not_sent_again(tmp_path, tools):
    """The first tracker has dropped the steps after 2; the second one lacks steps 2 and 5."""
    lines = [{"step": step, "loss": float(step)} for step in range(1, 6)]
    file = MetricsFile(tmp_path / METRICS, 0)
    for line in lines:
        file.write(line)
    file.close()
    file = MetricsFile(tmp_path / METRICS, 2)
    file.close()
    tools[0].stored, tools[1].stored = range(3), (1, 3, 4)
    both = Trackers(BOTH, tmp_path, 2, pytest.fail, file.unsent)
    for line in (*lines[2:4], {"step": 4, "val_loss": 1.0}, lines[4], {"step": 6, "loss": 6.0}):
        both.log_line(line)
    after = [(4, {"val_loss": 1.0}), (5, {"loss": 5.0}), (6, {"loss": 6.0})]
    assert tools[0].calls == [(3, {"loss": 3.0}), (4, {"loss": 4.0}), *after]
    assert tools[1].calls == [(2, {"loss": 2.0}), *after]


@pytest.mark.parametrize("method", ["start", "log", "close"])
def test_a_failing_tracker_is_reported_once_and_others_stay(tmp_path, tools, monkeypatch, method):
    one, other = tools
    other.fails_at = method
    if method == "start":
        monkeypatch.setitem(trackers._TRACKERS, "wandb", lambda *about: 1 / 0)
    messages: list[str] = []
    both = Trackers(BOTH, tmp_path, 0, messages.append)
    both.log_line(LINE)
    both.log_line(LINE)
    both.close(succeeded=True)
    assert len(messages) == 1
    assert messages[0].startswith("log.trackers=wandb: ")
    assert messages[0].endswith("; the run continues without it")
    assert "\n" not in messages[0]
    assert len(one.calls) == 3


def test_a_tracker_that_does_not_close_is_abandoned(tmp_path, tools, monkeypatch):
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.05)
    never = threading.Event()
    tools[1].close = lambda *, succeeded: never.wait(5)
    messages: list[str] = []
    Trackers(BOTH, tmp_path, 0, messages.append).close(succeeded=True)
    assert messages == ["log.trackers=wandb: not closed within 0.05 s, values may be missing"]
    never.set()


def test_no_tracker_starts_unless_configured(tmp_path, tools):
    Trackers(Config(), tmp_path, 0, pytest.fail).log_line(LINE)
    assert [each.calls for each in tools] == [[], []]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_reported_before_the_start(monkeypatch, name):
    config = compose_config([f"log.trackers=[{name}]"]).config
    out = rf"log.trackers={name}: {name}\S* not installed; run `pip install '\S*{name}\S*'`"
    # The second spec is that of a folder `wandb` in the current directory.
    for spec in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(packages, "find_spec", lambda package, spec=spec: spec)
        with pytest.raises(UsageError, match=out):
            check_preflight(config)
        check_preflight(Config())
    with pytest.raises(UsageError, match="engine.program=torchtitan: for estimates only"):
        check_preflight(Config(engine=EngineConfig(program="torchtitan")))


@pytest.mark.parametrize(("text", "names"), [
    ("none", []), ("[]", []), ("wandb", ["wandb"]), ("[mlflow, Wandb,mlflow]", ["mlflow", "wandb"]),
])  # fmt: skip
def test_trackers_are_a_list(text, names):
    assert compose_config([f"log.trackers={text}"]).config.log.tracker_names == names


def test_a_resumed_wandb_run_begins_where_it_ended_and_its_steps_increase(tmp_path, monkeypatch):
    begun: list[dict[str, Any]] = []
    logged: list[Any] = []
    ended: list[int] = []

    def init(**kwargs: Any) -> SimpleNamespace:
        begun.append(kwargs)
        return SimpleNamespace(
            resumed=len(begun) > 1, starting_step=5, offline=False,
            log=lambda figures, step: logged.append((step, figures)),
            finish=lambda exit_code: ended.append(exit_code),
        )  # fmt: skip

    fake = ModuleType("wandb")
    vars(fake).update(init=init, Settings=lambda **kwargs: kwargs)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    config = replace(Config(), log=LogConfig("wandb"))
    written = [{"step": step, "loss": 1.0} for step in (4, 5)]
    for succeeded in (True, False):
        result = Trackers(config, tmp_path, 3, pytest.fail, () if succeeded else written)
        for step, name in ((4, "loss"), (5, "loss"), (4, "checkpoint_seconds")):
            result.log_line({"step": step, name: 1.0})
        result.close(succeeded=succeeded)
    first, second = begun
    assert ended == [0, 1]
    late = (5, {"checkpoint_seconds": 1.0})
    assert logged == [(4, {"loss": 1.0}), (5, {"loss": 1.0}), late, (5, {"loss": 1.0}), late]
    assert first["id"] == second["id"] == (tmp_path / TRACKER_ID).read_text().strip()
    assert (first["resume"], first["project"], first["dir"]) == ("allow", "theirs", str(tmp_path))
    assert first["config"]["strategy"] == "full_shard"
    (tmp_path / TRACKER_ID).write_text("../x")
    messages: list[str] = []
    Trackers(config, tmp_path, 0, messages.append)
    assert TRACKER_ID in messages[0]


def test_tensorboard_drops_the_points_after_the_resumed_step(tmp_path):
    pytest.importorskip("tensorboard")
    run_twice(tmp_path, "tensorboard")
    assert stored_by_tensorboard(tmp_path)["loss"] == [(step, step) for step in range(1, 26)]


def run_twice(folder: Path, name: str) -> None:
    """Log as a run that is killed after step 21 and resumes from step 20.

    MLflow lacks step 19, which a killed run can lose.
    """
    for begins, ends in ((0, 21), (20, 25)):
        metrics = MetricsFile(folder / METRICS, begins)
        result = Trackers(configured(name), folder, begins, pytest.fail, metrics.unsent)
        for step in range(begins + 1, ends + 1):
            for line in ({"step": step, "loss": float(step)}, {"step": step, "loss/a+b": 0.5}):
                metrics.write(line)
                if (step, name) != (19, "mlflow"):
                    result.log_line(line)
        result.close(succeeded=ends == 25)
        metrics.close()


def stored_by_tensorboard(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder / TENSORBOARD))
    result.Reload()
    tags = result.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in result.Scalars(tag)] for tag in tags}


def stored_by_wandb(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    from wandb.proto import wandb_internal_pb2

    number = (folder / TRACKER_ID).read_text().strip()
    values: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((folder / "wandb").glob(f"offline-run-*/run-{number}.wandb")):
        for data in _log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                (each.key or each.nested_key[0]): json.loads(each.value_json)
                for each in record.history.item
            }
            for name in items.keys() - {"_step", "_runtime", "_timestamp"}:
                values.setdefault(name, []).append((items["_step"], items[name]))
    return values


def _log_records(data: bytes) -> Iterator[bytes]:
    """Return the records of a file in LevelDB's log format, after a header of 7 bytes."""
    offset, record = 7, b""
    while offset + 7 <= len(data):
        if (left := -offset % 32768) < 7:  # the rest of a block
            offset += left
        size, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def stored_by_trackio(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    from trackio.sqlite_storage import SQLiteStorage

    name = f"{folder.name}-{(folder / TRACKER_ID).read_text().strip()}"
    assert SQLiteStorage.get_runs("mine") == [name]
    assert SQLiteStorage.get_run_config("mine", name)["strategy"] == "full_shard"
    values: dict[str, list[tuple[int, float]]] = {}
    for row in SQLiteStorage.get_logs("mine", name):
        for each in row.keys() - {"timestamp", "step"}:
            values.setdefault(each, []).append((row["step"], row[each]))
    return values


def stored_by_mlflow(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("mine").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == (folder.name, "FINISHED")
    assert run.data.params["strategy"] == "full_shard"
    points = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {
        name.replace("a_b", "a+b"): [(each.step, each.value) for each in values]
        for name, values in points.items()
    }


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    assert {each.name for each in tmp_path.iterdir()} <= {"run", "trackio", "mlflow.db", "mlruns"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of these packages
@pytest.mark.parametrize("name", TRACKERS)
def test_a_store_has_each_value_once_after_a_resume(offline, name):
    pytest.importorskip(name)
    run_twice(offline, name)
    stored = {
        "tensorboard": stored_by_tensorboard, "wandb": stored_by_wandb,
        "trackio": stored_by_trackio, "mlflow": stored_by_mlflow,
    }[name](offline)  # fmt: skip
    assert sorted(stored["loss"]) == [(step, step) for step in range(1, 26)]
    assert sorted(stored["loss/a+b"]) == [(step, 0.5) for step in range(1, 26)]
