"""Other tools that are told the figures."""

import sys
import threading
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.placement import EngineConfig
from fsdpctl.config.schema import Config
from fsdpctl.config.training import LogConfig
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import TENSORBOARD, WANDB_ID
from fsdpctl.resolve import rules as besides
from fsdpctl.resolve.rules import check_preflight
from fsdpctl.training import journal
from fsdpctl.training.journal import Loggers

BOTH = replace(Config(), log=LogConfig(tensorboard=True, wandb=True))
LINE = {"step": 3, "loss": 0.5, "mfu": None, "state": "done", "tokens": 7, "flag": True}


class Heard:
    """What stands in for either tool."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.heard: list[Any] = []

    def log(self, step: int, figures: Any) -> None:
        self.heard.append((step, dict(figures)))
        if self.fails_at == "log":
            raise RuntimeError("lost the\nconnection")

    def close(self, *, well: bool) -> None:
        self.heard.append("closed")
        if self.fails_at == "close":
            raise RuntimeError("lost")


@pytest.fixture
def tools(monkeypatch):
    """Both tools, of which W&B may be made to fail."""
    one, other = Heard(), Heard()
    monkeypatch.setattr(journal, "_TensorBoard", lambda run_dir, step: one)
    monkeypatch.setattr(journal, "_Wandb", lambda config, run_dir: other)
    return one, other


def test_loggers_get_the_numbers_of_each_line(tmp_path, tools):
    both = Loggers(BOTH, tmp_path, 0, pytest.fail)
    both.line(LINE)
    both.line({"step": 4, "warning": "odd"})
    both.close(well=True)
    assert [each.heard for each in tools] == [[(3, {"loss": 0.5, "tokens": 7}), "closed"]] * 2


@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_a_failing_logger_is_reported_once_and_the_other_continues(
    tmp_path, tools, monkeypatch, where
):
    one, other = tools
    other.fails_at = where
    if where == "start":
        monkeypatch.setattr(journal, "_Wandb", lambda config, run_dir: 1 / 0)
    said: list[str] = []
    both = Loggers(BOTH, tmp_path, 0, said.append)
    both.line(LINE)
    both.line(LINE)
    both.close(well=True)
    assert len(said) == 1
    assert said[0].startswith("log.wandb: ")
    assert said[0].endswith("; the run continues without it")
    assert "\n" not in said[0]
    assert len(one.heard) == 3


def test_a_logger_that_does_not_close_is_abandoned(tmp_path, tools, monkeypatch):
    monkeypatch.setattr(journal, "_LEAVING_SECONDS", 0.05)
    never = threading.Event()
    tools[1].close = lambda *, well: never.wait(5)
    said: list[str] = []
    Loggers(BOTH, tmp_path, 0, said.append).close(well=True)
    assert said == ["log.wandb: not closed within 0.05 s, values may be missing"]
    never.set()


def test_no_logger_starts_unless_configured(tmp_path, tools):
    Loggers(Config(), tmp_path, 0, pytest.fail).line(LINE)
    assert [each.heard for each in tools] == [[], []]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_reported_before_the_start(monkeypatch, name):
    config = compose_config([f"log.{name}=true"]).config
    said = rf"log.{name}=true: {name}\S* not installed; run `pip install '\S*{name}\S*'`"
    # As a folder `wandb` in the current one is found.
    for found in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(besides, "find_spec", lambda package, found=found: found)
        with pytest.raises(UsageError, match=said):
            check_preflight(config)
        check_preflight(Config())
    with pytest.raises(UsageError, match="engine.program=torchtitan: for estimates only"):
        check_preflight(Config(engine=EngineConfig(program="torchtitan")))


def test_all_starts_have_the_same_wandb_id(tmp_path, monkeypatch):
    begun: list[dict[str, Any]] = []
    ended: list[int] = []

    def init(**about: Any) -> SimpleNamespace:
        begun.append(about)
        return SimpleNamespace(
            define_metric=lambda *args, **about: None,
            finish=lambda exit_code: ended.append(exit_code),
        )

    fake = ModuleType("wandb")
    vars(fake).update(init=init, Settings=lambda **about: about)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    config = replace(Config(), log=LogConfig(wandb=True))
    for well in (True, False):
        Loggers(config, tmp_path, 0, pytest.fail).close(well=well)
    first, second = begun
    assert ended == [0, 1]
    assert first["id"] == second["id"] == (tmp_path / WANDB_ID).read_text().strip()
    assert (first["resume"], first["project"], first["dir"]) == ("allow", "fsdpctl", str(tmp_path))
    (tmp_path / WANDB_ID).write_text("../x")
    said: list[str] = []
    Loggers(config, tmp_path, 0, said.append)
    assert "wandb-id.txt" in said[0]


def test_tensorboard_drops_the_points_after_the_resumed_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(Config(), log=LogConfig(tensorboard=True))
    for begins, steps in ((0, range(1, 31)), (20, range(21, 26))):
        board = Loggers(config, tmp_path, begins, pytest.fail)
        for step in steps:
            board.line({"step": step, "loss": float(begins + step)})
        board.close(well=True)
    found = EventAccumulator(str(tmp_path / TENSORBOARD))
    found.Reload()
    points = [(each.step, each.value) for each in found.Scalars("loss")]
    assert points == [(s, s) for s in range(1, 21)] + [(s, 20 + s) for s in range(21, 26)]


@pytest.mark.slow
def test_wandb_offline_has_one_run_for_all_starts(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = replace(Config(), log=LogConfig(wandb=True))
    for begins in (0, 5):
        board = Loggers(config, tmp_path, begins, pytest.fail)
        board.line({"step": begins + 1, "loss": 1.0})
        board.close(well=True)
    number = (tmp_path / WANDB_ID).read_text().strip()
    kept = [each.name for each in (tmp_path / "wandb").glob("offline-run-*")]
    assert kept
    assert all(name.endswith(f"-{number}") for name in kept)
    assert any((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
