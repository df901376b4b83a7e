"""Measurement of the operators of real forward and backward passes, and of copies."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpctl.comm.waits import mark, seconds_between
from fsdpctl.config.model import ModelConfig
from fsdpctl.estimate.observed_work import work_of
from fsdpctl.models.attention import attend
from fsdpctl.models.kernels import using
from fsdpctl.models.registry import build_model
from fsdpctl.plan.attention_kernels import OF_TORCH
from fsdpctl.predict.compute import Work, WorkKind
from fsdpctl.predict.profile import MeasuredPoint, Observed

_ROUNDS = 3  # per model; medians are used
_FEWEST, _MORE, _BYTES = 5, 40, 64 << 20  # rounds per size: as many as add up to these bytes
# Architecture, width, length of a sample, samples, vocabulary of models with two blocks each. Large
# vocabularies result in tensors that the host's allocator requests from the system each time.
SMALL = (
    ("llama", 128, 64, 4, 512), ("llama", 128, 128, 8, 512), ("llama", 256, 128, 8, 1024),
    ("gpt2", 256, 64, 16, 1024), ("qwen3", 256, 256, 4, 2048), ("llama", 512, 128, 4, 2048),
    ("llama", 512, 256, 8, 4096), ("gpt2", 768, 256, 2, 4096), ("llama", 1024, 256, 2, 4096),
    ("gpt2", 256, 128, 4, 32768), ("gpt2", 384, 256, 4, 49152),
)  # fmt: skip
LARGE = (
    ("llama", 1024, 1024, 2, 8192), ("llama", 2048, 2048, 2, 32768), ("gpt2", 2048, 2048, 4, 8192),
    ("qwen3", 2048, 4096, 1, 32768), ("llama", 4096, 4096, 1, 16384),
    ("llama", 4096, 8192, 1, 131072),
)  # fmt: skip
LAUNCHES, _PASS_LAUNCHES = 0.005, 0.1  # seconds for the host to launch a few kernels, or a pass
_CYCLES = 2e9  # of a GPU's clock per second, approximately
Sized = tuple[str, int, int, int, int]


class _Stopwatch(TorchDispatchMode):
    """Records the work of each operator and its time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: list[tuple[Work, Callable[[], float]]] = []
        self._on_cuda = device.type == "cuda"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        before = mark(on_cuda=self._on_cuda)
        result = func(*args, **(kwargs or {}))
        after = mark(on_cuda=self._on_cuda)
        work = work_of(func, args, kwargs, result)
        if work is not None:
            self.seen.append((work, lambda: seconds_between(before, after)))
        return result


def _passes(sized: Sized, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs forward and backward of a model."""
    architecture, width, length, samples, vocab_size = sized
    heads = max(2, width // 64)
    config = ModelConfig(
        name="profile", architecture=architecture, num_layers=2, hidden_size=width,
        intermediate_size=3 * width, num_heads=heads, num_kv_heads=heads, vocab_size=vocab_size,
        max_seq_len=8192, tie_embeddings=False,
    )  # fmt: skip
    if architecture != "gpt2" and width >= 512:
        config = replace(config, num_kv_heads=heads // 2)
    module = build_model(config).to_empty(device=device).to(dtype)
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.02)
    tokens = torch.randint(0, 128, (samples, length), device=device)

    def run() -> None:
        loss: Tensor = module(tokens, tokens, None)
        (loss / tokens.numel()).backward()
        for param in module.parameters():
            param.grad = None

    return run


def observe_models(
    models: Sequence[Sized],
    device: torch.device,
    dtype: torch.dtype,
    meet: Callable[[], object],
    say: Callable[[str], None],
) -> tuple[list[Observed], float]:
    """Measure the operators of `models`, and the host's overhead per operator.

    `meet` is a barrier of all ranks, so that they compute concurrently.

    Returns:
        The operators with their seconds, and the host's seconds per operator.
    """
    seen: dict[Sized, list[list[Observed]]] = defaultdict(list)
    timed: dict[Sized, list[float]] = defaultdict(list)
    # In rounds, so that a moment in which the machine is slower affects all models alike.
    for number, sized in product(range(_ROUNDS), models):
        architecture, width, length, samples, _ = sized
        about = f"{architecture}, width {width}, {samples} x {length} tokens"
        say(f"operators of {about}, round {number + 1} of {_ROUNDS}")
        run = _passes(sized, device, dtype)
        run()
        meet()
        timed[sized].append(seconds_of(run, device))
        meet()
        with _Stopwatch(device) as watch:
            device_seconds(run, device, _PASS_LAUNCHES)
        seen[sized].append([_observed(work, seconds()) for work, seconds in watch.seen])
    found: list[Observed] = []
    overheads: list[float] = []
    for sized in models:
        operators = [
            same[0]._replace(seconds=statistics.median(each.seconds for each in same))
            for same in zip(*seen[sized], strict=True)
        ]
        found += operators
        busy = sum(each.seconds for each in operators)
        overheads.append((statistics.median(timed[sized]) - busy) / len(operators))
    if device.type == "cuda":
        say("attention kernels")
        found += _observe_kernels(models, device, dtype)
    return _merged(found), max(0.0, statistics.median(overheads))


def _observe_kernels(
    models: Sequence[Sized], device: torch.device, dtype: torch.dtype
) -> list[Observed]:
    """Measure each attention kernel of torch that runs, in heads of 128 for the sizes of `models`.

    `model.attention=auto` compares them.
    """
    found: list[Observed] = []
    for kernel, (_, width, length, samples, _) in product(OF_TORCH, models):
        size = (samples, max(1, width // 128), length, 128)
        drawn = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
        with suppress(RuntimeError), using(kernel, alone=True):
            found += _attention(drawn, device)
    return found


def _attention(drawn: Tensor, device: torch.device) -> list[Observed]:
    def run() -> None:
        mixed = attend(drawn, drawn, drawn)
        torch.autograd.grad(mixed, drawn, mixed.detach())

    run()
    rounds = []
    for _ in range(_ROUNDS):
        with _Stopwatch(device) as watch:
            device_seconds(run, device)
        rounds.append([_observed(work, seconds()) for work, seconds in watch.seen])
    return [
        same[0]._replace(seconds=statistics.median(each.seconds for each in same))
        for same in zip(*rounds, strict=True)
        if same[0].kind in (WorkKind.ATTENTION.value, WorkKind.ATTENTION_BACKWARD.value)
    ]


def _observed(work: Work, seconds: float) -> Observed:
    return Observed(
        work.name, work.kind.value, work.flops, work.nbytes, work.itemsize, work.dims, seconds
    )


def _merged(observed: Sequence[Observed]) -> list[Observed]:
    """Merge operators of the same kind and size, with the mean of their times."""
    alike: dict[Observed, list[float]] = defaultdict(list)
    for each in observed:
        alike[each._replace(seconds=0.0)].append(each.seconds)
    return [about._replace(seconds=sum(times) / len(times)) for about, times in alike.items()]


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has finished, including launches by the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def device_seconds(
    run: Callable[[], object], device: torch.device, ahead: float = LAUNCHES
) -> float:
    """Return the seconds of the device alone, after the host has launched everything.

    A GPU idles for `ahead` seconds first, so that the host's launches are hidden.
    """
    if device.type != "cuda":
        return seconds_of(run, device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(ahead * _CYCLES))
    before = mark(on_cuda=True)
    run()
    after = mark(on_cuda=True)
    torch.cuda.synchronize(device)
    return seconds_between(before, after)


def observe_sizes(
    sizes: Sequence[int],
    make: Callable[[int], Callable[[], object]],
    device: torch.device,
    meet: Callable[[], object],
) -> list[MeasuredPoint]:
    """Measure `make(size)()` for each of `sizes` in bytes; return medians.

    Small sizes run more often, so that short disturbances do not affect their times.
    """
    points = []
    for size in sizes:
        run = make(size)
        run()
        times = []
        for _ in range(_FEWEST + _BYTES // max(size, _BYTES // _MORE)):
            meet()
            times.append(device_seconds(run, device))
        points.append(MeasuredPoint(size, statistics.median(times)))
    return points
