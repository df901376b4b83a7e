"""The durations of a step's phases, and profiles."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch

from fsdpctl.comm.waits import HostWaits
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.run.step_metrics import StepClock
from fsdpctl.training.callbacks.profiling import Profiling
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.trainer import Trainer
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches


def test_waiting_does_not_count_as_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 6.0, 6.5, 8.5])  # what each call of the clock returns
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    waits = HostWaits()
    clock = StepClock(torch.device("cpu"), waits.take)
    clock.lap("data")
    clock.lap("compute")
    waits.measure(lambda: None)  # from 5 to 6
    clock.lap("compute")
    clock.lap("optimizer")
    times = clock.times()
    assert (times.data, times.compute, times.exposed_communication) == (1, 3 + 1.5, 1)
    assert ((times.optimizer, times.total), waits.take()()) == ((2, 8.5), 0)


@distributed(world_size=2)
def test_a_rank_counts_the_time_it_waits_for_others(rank: int, world_size: int) -> None:
    for strategy in ("full_shard", "no_shard"):
        model = shard_model(make_net(tied=False), strategy)
        model.mesh.take_waits()
        if rank == 0:
            time.sleep(0.2)  # rank 1 has to wait for rank 0
        next_token_loss(model, token_batches(1, world_size)[0][rank][0]).backward()
        waited = model.mesh.take_waits()()
        assert (waited >= 0.15) == (rank == 1), (strategy, waited)


def traced_steps(
    profiling: Profiling, model: ShardedModel, steps: range, requested: Sequence[int] = ()
) -> list[int]:
    """Do backward passes for `steps`, and return those that complete a trace."""
    run = cast(Trainer, SimpleNamespace(step=steps.start, total_steps=steps.stop, is_traced=False))
    vars(run).update(collectives=Mock(), requests=Mock())
    profiling.begin(run)
    batch, results = token_batches(1, 1)[0][0][0], []
    for step in steps:
        run.step = step
        profiling.act(run, RequestFlags(profile=step in requested))
        was_traced = run.is_traced
        next_token_loss(model, batch).backward()
        profiling.after_launch(run)
        if was_traced and not run.is_traced:
            results.append(step)
    profiling.end(run, None)
    return results


@pytest.mark.parametrize(("steps", "traced"), [(8, 3), (5, 3), (2, 2)])
def test_a_trace_names_units_and_collectives(tmp_path: Path, steps: int, traced: int) -> None:
    model = shard_model(make_net(tied=False), "no_shard")
    profiling = Profiling(model, tmp_path, 0, at_start=True)
    assert traced_steps(profiling, model, range(10, 10 + steps)) == [9 + min(steps, 5)]
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "from-step-10-rank-0.json"
    events = json.loads(file.read_text())["traceEvents"]
    named = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    for unit in model._runtime.schedule.order.forward:
        assert named.count(f"forward {unit}") == named.count(f"backward {unit}") == traced
        assert named.count(f"reduce {unit}") == named.count(f"take the sum of {unit}") == traced
    passes = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["name"].startswith(("forward ", "backward ")) and e.get("cat") == "user_annotation"
    )
    assert all(before[1] <= after[0] for before, after in pairwise(passes))


def test_without_a_profile_units_have_no_names(tmp_path: Path) -> None:
    model = shard_model(make_net(tied=False), "no_shard")
    with torch.profiler.profile() as trace:
        assert traced_steps(Profiling(model, tmp_path, 0, at_start=False), model, range(1)) == []
    assert not [each.key for each in trace.key_averages() if each.key.startswith("forward ")]


def test_a_trace_requested_later_has_its_own_files(tmp_path: Path) -> None:
    model = shard_model(make_net(tied=False), "no_shard")
    profiling = Profiling(model, tmp_path, 0, at_start=False)
    # One step starts the tracer, and three are traced.
    assert traced_steps(profiling, model, range(12), requested=(1, 6)) == [4, 9]
    names = sorted(file.name for file in (tmp_path / "profile").iterdir())
    assert names == ["from-step-1-rank-0.json", "from-step-6-rank-0.json"]
    for file in (tmp_path / "profile").iterdir():
        events = json.loads(file.read_text())["traceEvents"]
        named = [e["name"] for e in events if e.get("cat") == "user_annotation"]
        units = model._runtime.schedule.order.forward
        assert [named.count(f"forward {unit}") for unit in units] == [3] * len(units)
