"""Runs with states in host memory or moments in another dtype: resuming, kills and adapters."""

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdpctl.engine.blocks import missing_compiler
from fsdpctl.engine.offload import HostStates
from fsdpctl.run.directory import changed_settings, inspect_run_dir
from tests.commands.run import figures
from tests.distributed import distributed
from tests.matrix import fast
from tests.training import test_lora
from tests.training.ranks import new_trainer, resolved, run_args, train

STEPS = 7


def typed_for(folder: Path, ranks: int, *more: str) -> list[str]:
    return run_args(folder, ranks, f"train.steps={STEPS}", f"train.run_dir={folder / 'run'}", *more)


def run(
    folder: Path, ranks: int, *more: str, **kwargs: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train; return the losses of all steps and the weights."""
    typed, file = typed_for(folder, ranks, *more), folder / "weights.pt"
    train(world_size=ranks, typed=typed, plants={}, result=str(file), **kwargs)
    assert Path(f"{file}.error").read_text() == ""
    return losses_in(folder), torch.load(file)


def losses_in(folder: Path) -> list[float]:
    return [loss for _, loss, _ in figures(folder / "run") if loss is not None]


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


@distributed(timeout=60)
def killed(rank: int, world_size: int, typed: list[str], last: int, slow: float) -> None:
    """Train, and kill all ranks in the host's part of a step, after the first units are updated."""
    right, trainer = HostStates._step, new_trainer(typed)
    done = 0

    def step(self: HostStates, *args: Any) -> Any:
        nonlocal done
        time.sleep(slow)  # so that the next forward waits for the rest
        if trainer.step >= last:
            if done == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
        return right(self, *args)

    with mock.patch.object(HostStates, "_step", step):
        trainer.run()


@pytest.mark.slow
@pytest.mark.parametrize("case", fast(
    (1, 6, ["strategy.offload=all"]),
    slow=[
        (2, 5, ["strategy.offload=states,gradients"]),
        (2, 4, ["strategy.offload=all", "checkpoint.mode=async"]),  # while a checkpoint is written
        (3, 5, ["strategy.offload=states", "strategy=shard_optimizer", "precision=bf16"]),
    ],
))  # fmt: skip
def test_a_run_that_is_killed_in_a_step_of_the_host_resumes_with_the_same_bits(tmp_path, case):
    ranks, last, more = case
    (tmp_path / "whole").mkdir()
    losses, weights = run(tmp_path / "whole", ranks, *more)
    with pytest.raises(AssertionError, match=r"died without a report|closed|reset"):
        killed(world_size=ranks, typed=typed_for(tmp_path, ranks, *more), last=last, slow=0.002)
    before = losses_in(tmp_path)
    assert before == losses[: len(before)]
    assert last - 1 <= len(before) <= last
    after, result = run(tmp_path, ranks, *more)
    assert_same(result, weights)
    assert after[-3:] == losses[-3:]


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["states", "states,gradients", "all"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stopped_run_resumes_at_another_number_of_ranks(tmp_path, ranks, offload):
    (tmp_path / "whole").mkdir()
    losses, weights = run(tmp_path / "whole", 2)
    more = [f"strategy.offload={offload}"]
    run(tmp_path, 2, *more, "train.steps=4")
    result, resumed = run(tmp_path, ranks, *more)
    assert result == pytest.approx(losses, abs=1e-5)
    for name, value in weights.items():
        assert torch.allclose(resumed[name], value, atol=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more"), [
    (2, ["strategy.offload=states"]),
    (2, ["strategy.offload=states,gradients", "model.base_dtype=nf4", "precision=bf16"]),
    (1, ["strategy.offload=params", "model.base_dtype=nf4", "precision=bf16"]),
    (2, ["strategy.offload=all"]),
    (3, ["strategy.offload=states,gradients", "accumulation=last", "accumulation.steps=2"]),
])  # fmt: skip
def test_adapters_have_the_bits_of_states_on_the_device(tmp_path, ranks, more):
    state: dict[str, dict[str, Tensor]] = {}
    losses = []
    on_device = [each for each in more if "offload" not in each]
    for name, settings in (("device", on_device), ("host", more)):
        folder = tmp_path / name
        folder.mkdir()
        typed = test_lora.lora_args(folder, ranks, *settings)
        state[name] = test_lora.run(typed, ranks, folder / "state")
        losses.append(test_lora.losses(folder))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.1
    assert_same(state["host"], state["device"])


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler("cpu") is not None, reason=str(missing_compiler("cpu")))
@pytest.mark.parametrize("offload", ["states", "all"])
def test_compiled_blocks_have_the_bits_of_states_on_the_device(tmp_path, offload):
    results = []
    for mode in ("none", offload):
        folder = tmp_path / mode
        folder.mkdir()
        results.append(run(folder, 2, "train.compile=true", f"strategy.offload={mode}"))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", fast(1, slow=[2]))
def test_a_run_resumes_with_another_dtype_of_moments_and_prints_it(tmp_path, ranks):
    results, before = [], ""
    for number, dtype in enumerate(("float32", "int8", "float32"), start=1):
        more = [f"optimizer.state_dtype={dtype}", f"train.steps={3 * number}"]
        config = resolved(typed_for(tmp_path, ranks, *more))
        printed = changed_settings(inspect_run_dir(config, "auto"), config) if before else []
        line = f"optimizer.state_dtype was {before}, is {dtype}, which changes the losses"
        assert (line in printed) == bool(before)
        results, before = run(tmp_path, ranks, *more)[0], dtype
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", ranks, "train.steps=9")[0]
    assert results[:4] == expected[:4]  # the first update that differs is that of step 4
    assert results[4:] != expected[4:]
    assert results == pytest.approx(expected, abs=0.02)
