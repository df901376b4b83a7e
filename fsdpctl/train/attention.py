"""Selects the attention kernel of a run: the fastest on the run's own shape."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fsdpctl.comm.collectives import ObjectExchange
from fsdpctl.comm.waits import mark, seconds_between
from fsdpctl.comm.world import World
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.models.attention import PLAIN, AttentionMask, Scores, attend, layer_masks
from fsdpctl.models.documents import ASSUMED_TOKENS, Documents, make_documents
from fsdpctl.models.kernels import can_undo, using
from fsdpctl.models.transformers_attention import Call, recorded
from fsdpctl.plan.attention import CUDNN, EFFICIENT, KERNELS, MATH, THEIRS
from fsdpctl.plan.context import heads_per_rank, tokens_per_rank
from fsdpctl.resolve.attention import candidates, with_kernel
from fsdpctl.resolve.decoder_check import quiet
from fsdpctl.resolve.machine import with_architecture
from fsdpctl.resolve.small_copy import small_copy
from fsdpctl.run.directory import rewrite_config

_WARM_UP, _ROUNDS = 2, 5
_TIE = 0.03  # of the fastest kernel's time: smaller than the noise of timings
_FIRST_CUDNN = 91501  # 9.15.1: earlier results may be wrong for lengths not divisible by 128


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a micro-batch in all layers of a model."""

    batch: int
    length: int
    heads: tuple[int, int]  # of queries; of keys and values
    width: int  # of a head
    dtype: torch.dtype
    windows: tuple[int | None, ...]  # of each layer
    has_documents: bool = False
    has_sinks: bool = False

    @staticmethod
    def of(config: Config) -> "Shape":
        """Return the shape of a resolved configuration, whose attention is ours."""
        model, size = config.model, config.train.micro_batch_size
        shared = config.train.context_parallel
        assert size is not None
        if model.is_foreign:
            return _as_called(config)
        return Shape(
            size,
            tokens_per_rank(config.train.seq_len, shared) * shared,
            heads_per_rank(model.num_heads, model.num_kv_heads, shared),
            model.head_dim or model.hidden_size // model.num_heads,
            getattr(torch, str(config.precision.param_dtype)),
            tuple(model.window_of(layer) for layer in range(model.num_layers)),
            config.data.holds_documents,
        )


def _as_called(config: Config) -> Shape:
    """Return the shape of a model of transformers, with a layer of each kind."""
    dense = Shape.of(replace(config, model=replace(config.model, architecture="llama")))
    called = _calls(config.model)
    if not called:
        return replace(dense, windows=())
    return replace(
        dense,
        heads=heads_per_rank(*called[0].heads, config.train.context_parallel),
        width=max(each.width for each in called),
        windows=tuple(each.window for each in called),
        has_sinks=any(each.scores.sinks is not None for each in called),
    )


@lru_cache(maxsize=1)
def _calls(model: ModelConfig) -> list[Call]:
    with quiet(), recorded() as calls:
        small_copy(model)(torch.zeros(1, 2, dtype=torch.int64))
    return [each for each in calls if each.scores.has_kernel]


@dataclass(frozen=True, slots=True)
class KernelSelection:
    """The kernel of a run, and the seconds of a layer's forward and backward by kernel."""

    kernel: str
    seconds: Mapping[str, float]

    @property
    def line(self) -> str:
        """The selection and the timings, to print."""
        ordered = sorted(self.seconds.items(), key=lambda each: each[1])
        parts = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in ordered]
        return f"attention: {self.kernel} selected ({', '.join(parts)}, forward and backward)"


def own_timings(config: Config, device: torch.device) -> dict[str, float]:
    """Time each kernel that may run a resolved configuration on this rank's GPU."""
    shape = Shape.of(config)
    found = timings(shape, _candidates(with_architecture(config), shape, device), device)
    found = found or timings(shape, [MATH], device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return found


def _candidates(config: Config, shape: Shape, device: torch.device) -> list[str]:
    """Return the kernels that may run and that the layers of `shape` would use."""
    seen = _seen(shape, device)
    unused = set()
    if None not in seen or (torch.backends.cudnn.version() or 0) < _FIRST_CUDNN:
        unused.add(CUDNN)  # it supports unmasked sequences only
    if any(each is not None and each.offsets is not None for each in seen):
        unused.add(EFFICIENT)  # it would need a mask of all pairs
    return [each for each in candidates(config) if each not in unused and can_undo(each)]


def selected(timed: Sequence[Mapping[str, float]]) -> KernelSelection:
    """Select by the timings of rank 0 among the kernels that run on all ranks.

    Raises:
        UsageError: If no kernel runs on all of them.
    """
    seconds = {
        name: timed[0][name] for name in KERNELS if all(name in of_rank for of_rank in timed)
    }
    if not seconds:
        raise UsageError("model.attention=auto: no kernel runs on all ranks; set model.attention")
    limit = min(seconds.values()) * (1 + _TIE)
    kernel = next(name for name, took in seconds.items() if took <= limit)
    return KernelSelection(kernel, seconds)


def check_kernel(config: Config, device: torch.device) -> None:
    """Check that the kernel of a resolved configuration runs on this rank's GPU.

    Raises:
        UsageError: If the kernel does not run.
    """
    kernel, shape = str(config.model.attention), Shape.of(config)
    with using(kernel):  # raises if a package is missing
        pass
    if not timings(shape, [kernel], device, rounds=1):
        dtype = str(shape.dtype).removeprefix("torch.")
        raise UsageError(
            f"model.attention={kernel}: does not run on {torch.cuda.get_device_name(device)} in "
            f"{dtype} with heads of {shape.width}; expected auto or another kernel"
        )


def timings(
    shape: Shape, kernels: Sequence[str], device: torch.device, *, rounds: int = _ROUNDS
) -> dict[str, float]:
    """Return the seconds of an average layer by kernel, without kernels that do not run."""
    found = {}
    no_room: torch.OutOfMemoryError | None = None
    for kernel in kernels:
        try:
            with warnings.catch_warnings(), using(kernel, alone=True):
                warnings.simplefilter("ignore")  # torch warns why a kernel does not run
                found[kernel] = _seconds(shape, device, rounds)
        except torch.OutOfMemoryError as error:
            no_room = error
        except (RuntimeError, UsageError):
            continue
    if no_room is not None and not found:
        raise no_room
    return found


def _seconds(shape: Shape, device: torch.device, rounds: int) -> float:
    """Return the seconds of forward and backward of a layer, averaged over all layers."""
    seen = _seen(shape, device)
    total = 0.0
    for sight in {id(each): each for each in seen}.values():
        count = sum(each is sight for each in seen)
        total += count * _seconds_of_layer(shape, sight, device, rounds)
    return total / len(seen)


def _seconds_of_layer(
    shape: Shape, sight: AttentionMask | None, device: torch.device, rounds: int
) -> float:
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's generator unchanged
    heads = (shape.heads[0], shape.heads[1], shape.heads[1], shape.heads[0])
    q, k, v, gradient = (_drawn(shape, count, device, generator) for count in heads)
    for each in (q, k, v):
        each.requires_grad_()
    times = []
    for _ in range(_WARM_UP + rounds):
        before = mark(on_cuda=device.type == "cuda")
        mixed = attend(q, k, v, sight, _scores(shape, device))
        torch.autograd.grad(mixed, (q, k, v), gradient)
        times.append((before, mark(on_cuda=device.type == "cuda")))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(seconds_between(*each) for each in times[_WARM_UP:])


def _drawn(shape: Shape, heads: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Draw projections laid out as a layer's: (batch, heads, length, width), heads innermost."""
    size = (shape.batch, shape.length, heads, shape.width)
    drawn = torch.randn(size, generator=generator, device=device, dtype=shape.dtype)
    return drawn.transpose(1, 2)


def _seen(shape: Shape, device: torch.device) -> list[AttentionMask | None]:
    like = torch.empty(shape.batch, shape.length, 1, device=device, dtype=shape.dtype)
    documents, scores = _documents(shape, device), _scores(shape, device)
    return layer_masks(like, shape.width, shape.windows, documents, scores)


def _scores(shape: Shape, device: torch.device) -> Scores:
    sinks = torch.zeros(shape.heads[0], device=device, dtype=shape.dtype)
    return Scores(sinks=sinks) if shape.has_sinks else PLAIN


def _documents(shape: Shape, device: torch.device) -> Documents | None:
    """Return documents of the length that estimates assume."""
    if not shape.has_documents:
        return None
    whole, rest = divmod(shape.length, ASSUMED_TOKENS)
    lengths = (ASSUMED_TOKENS,) * whole + ((rest,) if rest else ())
    return make_documents((lengths,) * shape.batch, device)


def settled(config: Config, world: World) -> tuple[Config, tuple[str, ...]]:
    """Select the attention kernel of a resolved configuration on GPUs. Collective.

    Returns the configuration with the kernel, which rank 0 also writes to the run directory, and
    messages to print.

    Raises:
        UsageError: If the kernel does not run.
        FsdpctlError: If the configuration cannot be written.
    """
    if world.device.type != "cuda" or config.model.attention == THEIRS:
        return config, ()
    if config.model.is_foreign and not Shape.of(config).windows:  # no layer runs a kernel
        return config, ()
    if config.model.attention is not None:
        check_kernel(config, world.device)
        return config, ()
    found = selected(ObjectExchange().gather_objects(own_timings(config, world.device)))
    config = with_kernel(config, found.kernel)
    if world.rank == 0:
        rewrite_config(config)
    return config, (found.line,)
