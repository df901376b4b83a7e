"""Progress lines of a run, FLOPs and memory."""

import pytest
import torch

from fsdpctl.config.clusters import gpu_by_name
from fsdpctl.config.compose import compose_config
from fsdpctl.optim.record import StepStats
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.run.progress import ProgressDisplay
from fsdpctl.run.step_metrics import (
    ModelFlops,
    PeakMemory,
    StepMetrics,
    StepTimes,
    flops_per_token,
    model_flops,
)
from fsdpctl.training.assemble import make_model


def test_a_quiet_run_prints_results_and_logs_everything(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FSDPCTL_QUIET", "1")
    log = tmp_path / "run.log"
    progress = ProgressDisplay(10, 0, log_every=1, shows=True, log=log)
    progress.say("self-check: passed", is_remark=True)
    progress.say("step 1: validation loss 2")
    with progress.stream() as write:
        for piece in ("Once ", "upon"):
            write(piece)
    assert capsys.readouterr().out == "step 1: validation loss 2\nOnce upon\n"
    out = [line.split(maxsplit=2)[2] for line in log.read_text().splitlines()]
    assert out == ["self-check: passed", "step 1: validation loss 2", "Once upon"]


def step_metrics(memory: PeakMemory, peak: float | None = None) -> StepMetrics:
    figures = StepStats(loss=3.2149, grad_norm=0.8412, tokens=20_000, was_applied=True)
    times = StepTimes(total=1.0, compute=1.0, exposed_communication=0.0, data=0.0, optimizer=0.0)
    flops = ModelFlops(48_000_000_000, peak)
    return StepMetrics(120, 1920, 20_000, figures, 2.9e-4, times, memory, flops, num_ranks=2)


@pytest.mark.parametrize(("memory", "error"), [
    (PeakMemory(None, 333 << 20), "333.0 MiB"),
    (PeakMemory(1, 459 << 30, 791 << 30, 0), "(10,000 per rank)  459.0/791.0 GiB (58%)"),
])  # fmt: skip
def test_a_line_has_the_values_that_other_trainers_print(capsys, memory, error):
    ProgressDisplay(1000, 0, log_every=10, shows=True, log=None).step(step_metrics(memory), None)
    line = capsys.readouterr().out
    start = "step 120/1000  loss 3.215  grad_norm 0.84  lr 0.00029  20,000 tok/s"
    assert line.startswith(f"{start}  {error}  " if memory.total is None else f"{start} {error}  ")
    assert "num_alloc_retries" in step_metrics(memory).to_line()


def test_the_mfu_is_shown_if_the_peak_of_the_device_is_known(capsys):
    metrics = step_metrics(PeakMemory(1, 459 << 30, 791 << 30, 0), peak=2 * 989e12)
    ProgressDisplay(1000, 0, log_every=10, shows=True, log=None).step(metrics, None)
    assert "(10,000 per rank)  48.5% MFU  459.0/791.0 GiB" in capsys.readouterr().out
    line = metrics.to_line()
    assert line["mfu"] == pytest.approx(0.485, abs=1e-3)
    assert line["model_flops_per_token"] == 48_000_000_000
    assert line["tokens_per_second_per_rank"] == 10_000
    assert step_metrics(PeakMemory(1, 1, 1, 0)).to_line()["mfu"] is None


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA GB200", 2500e12),
    ("Tesla V100-SXM2-16GB", 15.7e12),
    ("NVIDIA RTX A1000", None),  # not an A10
])  # fmt: skip
def test_peaks_are_found_by_device_name(name, peak):
    gpu = gpu_by_name(name)
    assert (gpu and gpu.peak_flops) == peak


def test_flops_are_counted_as_in_torchtitan():
    """torchtitan's log has 57.9 GFLOP per token for Llama 3 8B at 8,192 tokens."""
    config = compose_config(["model=llama3_8b"]).config.model
    assert flops_per_token(config, 8_030_261_248, 8192) == pytest.approx(57.9e9, rel=1e-3)
    args = ["model=llama3_8b", "model.overrides.tie_word_embeddings=true"]
    tied = compose_config(args).config.model
    without_head = 8_030_261_248 - 128_256 * 4096
    assert flops_per_token(tied, without_head, 8192) == flops_per_token(config, 8_030_261_248, 8192)


SHAPE = [
    "model.num_layers=3", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_heads=4", "model.num_kv_heads=2", "model.vocab_size=101", "train.seq_len=24",
    "launch.device=cpu", "precision=fp32",
]  # fmt: skip
_PER_LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32  # attention, MLP, norms
_ATTENTION = 12 * 3 * 32 * 24
_LAYERS = 3 * _PER_LAYER + 32  # and the last norm


@pytest.mark.parametrize(("args", "expected"), [
    (["model.overrides.tie_word_embeddings=false"], 6 * (_LAYERS + 101 * 32) + _ATTENTION),
    (["model.overrides.tie_word_embeddings=true"], 6 * (_LAYERS + 101 * 32) + _ATTENTION),
    # Frozen parameters have no gradient: 4 FLOP per parameter.
    (["model.overrides.tie_word_embeddings=false", "model.trainable=lm_head"],
     6 * 101 * 32 + 4 * _LAYERS + _ATTENTION),
    (["model.overrides.tie_word_embeddings=false", "model.lora.rank=2",
     "model.lora.targets=q_proj"], 4 * (_LAYERS + 101 * 32) + 6 * 3 * 2 * 64 + _ATTENTION),
    (["model.overrides.tie_word_embeddings=true", "model.lora.rank=2", "model.lora.targets=q_proj"],
     4 * (_LAYERS + 101 * 32) + 6 * 3 * 2 * 64 + _ATTENTION),
])  # fmt: skip
def test_flops_follow_the_formula(args, expected):
    config = stored_config(compose_config([*SHAPE, *args]).config)
    device = torch.device("cpu")
    model = make_model(config, device).module
    assert model_flops(config, model, device, 2) == ModelFlops(expected, None)


@pytest.mark.parametrize(("gpu", "dtype", "peak"), [
    ("NVIDIA H200", "bfloat16", 989e12), ("NVIDIA H200", "float32", None),
    ("NVIDIA K80", "bfloat16", None),
])  # fmt: skip
def test_the_peak_is_that_of_known_gpus_in_bfloat16(gpu, dtype, peak, monkeypatch):
    config = stored_config(compose_config([*SHAPE, f"precision.param_dtype={dtype}"]).config)
    model = make_model(config, torch.device("cpu")).module
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: gpu)
    assert model_flops(config, model, torch.device("cuda"), 2).peak == (peak and 2 * peak)
