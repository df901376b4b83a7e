"""A start does once what takes long."""

from pathlib import Path

import pytest

from benchmarks.startup import counted
from fsdpctl.cli import running
from fsdpctl.cli.rounds import Started
from fsdpctl.config.compose import compose_config
from fsdpctl.estimate import estimator
from tests.cli.run import make_text

SMALL = ["data=text", "model.num_layers=2", "launch.device=cpu", "launch.nproc_per_node=2"]


def test_a_start_opens_data_traces_and_chooses_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    estimator._traced.clear()
    words = [*SMALL, f"data.path={make_text(tmp_path)}", "train.run_dir=run", "strategy=auto"]
    composed = compose_config(words)
    started: list[Started | None] = []
    _, calls = counted(lambda: started.append(running._begin(composed, words, "auto")))
    assert started[0] is not None
    started[0].lock.release()
    assert (calls["open_data"], calls["trace"], calls["choose"]) == (1, 1, 1)
