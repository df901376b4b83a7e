"""A run's attention kernel: what may run, what is selected, and what is kept."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fsdpctl.comm.world import World
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model_path import CHECKPOINTS, RUN_CONFIG, model_words
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_from_words, config_to_yaml, config_words
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import placed_for_estimate
from fsdpctl.resolve.attention import (
    assumed_of,
    candidates,
    check_attention,
    with_kept_kernel,
    with_kernel,
)
from fsdpctl.resolve.run import decides_losses, run_identity
from fsdpctl.run.directory import read_config
from fsdpctl.train import attention
from fsdpctl.train.attention import Shape, selected, settled, timings

CPU = torch.device("cpu")
SHAPE = Shape(1, 32, (4, 2), 8, torch.float32, (None, 16, 16))


def placed(*words: str) -> Config:
    return placed_for_estimate(compose_config(["model.vocab_size=64", *words]))


def test_the_kernel_does_not_change_the_name_of_a_run():
    usual, other = placed(), placed("launch.device=cpu", "model.attention=math")
    assert "model.attention" not in config_words(usual)
    assert not decides_losses("model.attention")
    same = replace(usual, model=replace(usual.model, attention="math"))
    assert run_identity(same) == run_identity(usual)
    assert config_from_words(config_words(other)).model.attention == "math"


def test_the_kernel_is_not_part_of_a_model(tmp_path):
    (tmp_path / CHECKPOINTS).mkdir()
    config = with_kernel(placed(), "cudnn")
    (tmp_path / RUN_CONFIG).write_text(config_to_yaml(config))
    assert "model.attention: cudnn" in (tmp_path / RUN_CONFIG).read_text()
    assert "model.attention" not in model_words(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.device=cpu", "model.attention=cudnn"], "device=cpu; expected auto, flash, math"),
        (["cluster=a100_80", "model.attention=flash3"], "Ampere GPUs; expected auto, flash, cudnn"),
        (["cluster=h100", "precision=fp32", "model.attention=flash"],
         "precision.param_dtype=float32; expected auto, efficient, math"),
        (["cluster=h100", "train.deterministic=true", "model.attention=cudnn"],
         "train.deterministic=true; expected auto, flash, flash3"),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_run_is_rejected_in_one_line(words, said):
    with pytest.raises(UsageError, match=r"model\.attention=\w+: not supported") as caught:
        placed(*words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("flash_attn_interface") is not None, reason="it is installed")
def test_a_missing_package_is_named_at_the_start_of_a_run():
    config = placed("cluster=h100", "model.attention=flash3")
    with pytest.raises(UsageError, match="flash3: package flash_attn_interface not found"):
        check_attention(config, here=True)


def test_auto_selects_among_the_kernels_of_torch():
    assert assumed_of(placed("cluster=h100")) == "cudnn"
    assert assumed_of(placed("cluster=b200")) == "cudnn"
    assert assumed_of(placed("cluster=a100_80")) == "flash"
    assert assumed_of(placed("cluster=h100", "train.deterministic=true")) == "flash"
    assert assumed_of(placed("cluster=h100", "model.attention=flash3")) == "flash3"
    assert assumed_of(placed("launch.device=cpu")) is None


def test_candidates_are_the_kernels_that_may_run():
    h100 = placed("cluster=h100")
    assert {"flash", "cudnn", "efficient"} <= set(candidates(h100))
    assert "math" not in candidates(h100)
    assert "cudnn" not in candidates(placed("cluster=h100", "train.deterministic=true"))
    assert candidates(placed("cluster=h100", "precision=fp32")) == ["efficient"]


def test_the_fastest_kernel_of_all_ranks_is_selected():
    times = {"flash": 2e-3, "cudnn": 1e-3, "efficient": 3e-3}
    found = selected([times, dict.fromkeys(times, 1.0)])
    assert found.kernel == "cudnn"
    assert found.line == (
        "attention: cudnn selected (cudnn 1 ms, flash 2 ms, efficient 3 ms, forward and backward)"
    )
    assert selected([times, {"flash": 9.0, "efficient": 1.0}]).kernel == "flash"
    assert selected([{"flash": 1.01e-3, "cudnn": 1e-3}]).kernel == "flash"  # as fast
    with pytest.raises(UsageError, match="no kernel runs on all ranks"):
        selected([{"flash": 1.0}, {"efficient": 1.0}])


def test_kernels_are_timed_on_the_runs_shape():
    before = torch.random.get_rng_state()
    found = timings(SHAPE, ["flash", "efficient", "flash3", "math"], CPU)
    assert list(found) == ["flash", "math"]  # the CPU has no others
    assert all(0 < each < 10 for each in found.values())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_shape_is_that_of_a_micro_batch():
    words = ["train.micro_batch_size=3", "train.seq_len=64", "launch.device=cpu"]
    words += ["model.architecture=mistral", "model.sliding_window=16"]
    assert Shape.of(placed(*words)) == Shape(3, 64, (4, 2), 32, torch.float32, (16,) * 4)


def test_rank_0_writes_the_selection_to_the_configuration(tmp_path, monkeypatch):
    config = placed("cluster=h100", f"train.run_dir={tmp_path}")
    monkeypatch.setattr(attention, "own_timings", lambda *about: {"flash": 2.0, "cudnn": 1.0})
    world = World(0, 0, 1, torch.device("cuda", 0))
    found, (line,) = settled(config, world)
    assert found.model.attention == read_config(tmp_path).model.attention == "cudnn"
    assert line.startswith("attention: cudnn selected")
    assert settled(config, World(0, 0, 1, CPU)) == (config, ())


@pytest.mark.parametrize(("cluster", "kept"), [("hopper", "cudnn"), ("ampere", None)])
def test_a_selection_is_kept_while_it_can_run(monkeypatch, cluster, kept):
    monkeypatch.setattr("fsdpctl.resolve.machine.architecture_here", lambda: cluster)
    config = placed("cluster=h100")
    found = with_kept_kernel(config, "cudnn" if kept else "flash3")
    assert found.model.attention == kept
    assert with_kept_kernel(with_kernel(config, "flash"), "cudnn").model.attention == "flash"


def test_an_old_run_without_the_key_can_be_read(tmp_path: Path):
    (tmp_path / RUN_CONFIG).write_text(config_to_yaml(placed("launch.device=cpu")))
    assert read_config(tmp_path).model.attention is None


def test_an_out_of_memory_error_is_not_a_kernel_that_does_not_run(monkeypatch):
    def seconds(shape: Shape, device: torch.device, rounds: int) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "_seconds", seconds)
    with pytest.raises(torch.OutOfMemoryError):
        timings(SHAPE, ["flash", "math"], CPU)
