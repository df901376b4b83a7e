"""The time and the other measurements of a step, for metrics.jsonl and the terminal."""

import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from fsdpctl.comm.waits import GetWaitSeconds, TakeWaits, TimeStamp, seconds_between, time_stamp
from fsdpctl.config.clusters import gpu_by_name
from fsdpctl.config.decoder_config import config_value, model_type_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.models.build_model import count_active_parameters
from fsdpctl.models.experts import idle_parameters
from fsdpctl.models.quantized import count_weights
from fsdpctl.optim.record import StepStats

Phase = Literal["data", "compute", "optimizer"]
# Names in lines of metrics.jsonl and of experiment loggers.
RESERVED_NAMES = frozenset((
    "step", "samples", "loss", "grad_norm", "lr", "tokens", "trained_tokens", "tokens_per_second",
    "tokens_per_second_per_rank", "model_flops_per_token", "mfu", "loss_count",
    "samples_per_second", "samples_per_second_per_rank", "seconds", "compute_seconds",
    "exposed_communication_seconds", "data_seconds", "optimizer_seconds", "peak_allocated_bytes",
    "peak_reserved_bytes", "num_alloc_retries", "rejected_step", "checkpoint_seconds",
    "checkpoint_write_seconds", "upload_seconds",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of one step on this rank."""

    total: float
    compute: float  # forward and backward
    exposed_communication: float | None  # None: the other times include it
    data: float
    optimizer: float  # including the gradient norm


class StepClock:
    """A stopwatch for phases: the host's clock, or CUDA events, which do not block the host."""

    def __init__(self, device: torch.device, take_waits: TakeWaits | None) -> None:
        """Start a step."""
        self._on_cuda = device.type == "cuda"
        self._knows_waits = take_waits is not None
        self._take_waits = take_waits or (lambda: lambda: 0.0)
        self._take_waits()  # discards waits before the step
        self._began = time_stamp(on_cuda=self._on_cuda)
        self._last = self._began
        self._laps: list[tuple[Phase, TimeStamp, TimeStamp, GetWaitSeconds]] = []

    def lap(self, phase: Phase) -> None:
        """Attribute the time since the last lap to `phase`."""
        now = time_stamp(on_cuda=self._on_cuda)
        self._laps.append((phase, self._last, now, self._take_waits()))
        self._last = now

    def times(self) -> StepTimes:
        if isinstance(self._last, torch.cuda.Event):
            self._last.synchronize()
        spent = {"data": 0.0, "compute": 0.0, "optimizer": 0.0}
        exposed = 0.0
        for phase, start, end, waits in self._laps:
            waited = waits()
            spent[phase] += max(0.0, seconds_between(start, end) - waited)
            exposed += waited
        total = seconds_between(self._began, self._last)
        communication = exposed if self._knows_waits else None
        return StepTimes(total, exposed_communication=communication, **spent)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The FLOPs per token of a model, and the peak FLOP/s of the devices."""

    per_token: int  # forward and backward, without recomputation; 0: the model has no tokens
    peak: float | None  # FLOP/s of all ranks together; None: unknown

    def utilization(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilization, MFU (Chowdhery et al., PaLM, 2022)."""
        return None if self.peak is None else self.per_token * tokens_per_second / self.peak


def model_flops(config: Config, module: Any, device: torch.device, ranks: int) -> ModelFlops:
    if config.model.is_script_module:
        return ModelFlops(per_token=0, peak=None)
    per_token = flops_per_token(config.model, count_active_parameters(module), config.train.seq_len)
    per_token -= 2 * _num_frozen(module)
    gpu = None
    # Peaks of GPUs are known for bfloat16 only.
    if device.type == "cuda" and config.precision.param_dtype == "bfloat16":
        gpu = gpu_by_name(torch.cuda.get_device_name(device))
    return ModelFlops(per_token, None if gpu is None else gpu.peak_flops * ranks)


def _num_frozen(module: Any) -> int:
    """Count the frozen parameters that a token uses. Each needs 2 FLOPs less: it has no gradient.

    Every frozen parameter is assumed to propagate the gradient of an activation.
    """
    embeddings = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    embeddings -= {id(each.weight) for each in module.modules() if isinstance(each, nn.Linear)}
    counts, params = count_weights(module), dict(module.named_parameters())
    names = (name for name, param in params.items() if id(param) not in embeddings)
    frozen = sum(counts[name] for name in names if not params[name].requires_grad)
    return frozen - idle_parameters(module.transformers_model, only_frozen=True)


def flops_per_token(model: ModelConfig, num_params: int, seq_len: int) -> int:
    """Return 6 (N - N_embedding) + 12 L h s, as torchtitan does.

    N is `num_params`, the number of parameters that a token uses, L the number of layers, h the
    total width of a layer's heads, and s the `seq_len`. An embedding, also of positions (gpt2), is
    a lookup and does not count, unless it is also the output head. Attention counts as if every
    token saw all `seq_len` tokens; causal masking does not halve it.
    """
    assert model.vocab_size is not None
    if not config_value(model, "tie_word_embeddings"):
        num_params -= model.vocab_size * model.hidden_size
    if model_type_of(model) == "gpt2":
        num_params -= model.max_seq_len * model.hidden_size
    width = model.num_heads * model.used_head_dim
    return 6 * num_params + 12 * model.num_layers * width * seq_len


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The measurements of one optimizer step."""

    step: int  # steps completed, including this one
    samples: int  # samples consumed, including this step
    tokens: int  # tokens in the samples of all ranks, without padding
    stats: StepStats
    lr: float
    times: StepTimes
    memory: "PeakMemory"
    flops: ModelFlops
    num_ranks: int
    named_means: Mapping[str, float | None] = field(default_factory=dict)  # means of sums by name

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.times.total

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens per second of one rank, which on CUDA is one device."""
        return self.tokens_per_second / self.num_ranks

    @property
    def has_tokens(self) -> bool:
        """Whether the model is a decoder; otherwise, each sample counts as one token."""
        return self.flops.per_token > 0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None if the peak of the devices is unknown."""
        return self.flops.utilization(self.tokens_per_second)

    def to_line(self) -> dict[str, Any]:
        exposed = self.times.exposed_communication
        speed = round(self.tokens_per_second, 1), round(self.tokens_per_second_per_rank, 1)
        amounts: dict[str, Any] = {
            "tokens": self.tokens,
            "trained_tokens": self.stats.tokens,
            "tokens_per_second": speed[0],
            "tokens_per_second_per_rank": speed[1],
            "model_flops_per_token": self.flops.per_token,
            "mfu": self.mfu,
        }
        if not self.has_tokens:
            amounts = {
                "loss_count": self.stats.tokens,
                "samples_per_second": speed[0],
                "samples_per_second_per_rank": speed[1],
            }
        return {
            "step": self.step,
            "samples": self.samples,
            "loss": finite(self.stats.loss),
            "grad_norm": finite(self.stats.grad_norm),
            "lr": self.lr,
            **{name: None if x is None else finite(x) for name, x in self.named_means.items()},
            **amounts,
            "seconds": round(self.times.total, 6),
            "compute_seconds": round(self.times.compute, 6),
            "exposed_communication_seconds": None if exposed is None else round(exposed, 6),
            "data_seconds": round(self.times.data, 6),
            "optimizer_seconds": round(self.times.optimizer, 6),
            "peak_allocated_bytes": self.memory.allocated,
            "peak_reserved_bytes": self.memory.reserved,
            "num_alloc_retries": self.memory.retries,
        }


def finite(value: float) -> float | None:
    """Return `value`, or None if it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak memory of this rank since it started."""

    allocated: int | None  # memory of tensors; None on the CPU
    reserved: int  # memory of the caching allocator; on the CPU: resident memory
    total: int | None = None  # memory of the device
    retries: int | None = None  # how often the allocator had to empty its cache


def peak_memory(device: torch.device) -> PeakMemory:
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        names = "allocated", "reserved"
        allocated, reserved = (stats.get(f"{name}_bytes.all.peak", 0) for name in names)
        total = torch.cuda.get_device_properties(device).total_memory
        return PeakMemory(allocated, reserved, total, stats.get("num_alloc_retries", 0))
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    return PeakMemory(None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
