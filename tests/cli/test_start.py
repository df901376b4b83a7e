"""A start does once what takes long."""

from pathlib import Path

import pytest

from benchmarks.startup import counted
from fsdpctl.cli import rounds, running
from fsdpctl.cli.rounds import Started
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.estimate import estimator
from tests.cli.run import make_text

SMALL = [
    "data=text",
    "model.num_layers=2",
    "launch.device=cpu",
    "launch.nproc_per_node=2",
    "launch.nproc_min=1",
]


def test_a_start_opens_data_traces_and_chooses_once_and_a_restart_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    estimator._traced.clear()
    words = [*SMALL, f"data.path={make_text(tmp_path)}", "train.run_dir=run", "strategy=auto"]
    composed = compose_config(words)
    started: list[Started | None] = []
    _, calls = counted(lambda: started.append(running._begin(composed, words, "auto")))
    begun = started[0]
    assert begun is not None
    begun.lock.release()
    assert (calls["open_data"], calls["trace"], calls["choose"]) == (1, 1, 1)
    following: list[Config | None] = []
    _, calls = counted(lambda: following.append(rounds._resolved_for(begun, [0], is_stuck=True)))
    assert following[0] is not None
    assert following[0].launch.nproc_per_node == 1
    assert following[0].train.global_batch_size == begun.config.train.global_batch_size
    assert not {"open_data", "trace", "choose", "build_model"} & set(calls)
