"""AdamW over flat shards."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as _adamw

from fsdpctl.comm.flat_shard import (
    FlatShard,
    HostScalars,
    HostStepper,
    ShardedModelProtocol,
    require_sharded,
    trainable_shards,
)
from fsdpctl.comm.quantized_states import new_moment
from fsdpctl.errors import UsageError
from fsdpctl.optim.sharded import ShardedOptimizerMixin, SteppedSpan
from fsdpctl.optim.tiles import TiledStep
from fsdpctl.plan.layout import Span
from fsdpctl.plan.optimizers import STATE_DTYPES, tiled_dtype
from fsdpctl.plan.precision import SPLIT

_CODE_DTYPES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
# Elements that are stepped at a time in host memory: 8 MiB with moments and gradient, which stay in
# the cache until the new weights are cast.
_HOST_CHUNK = 1 << 19
_OPTIONS = ("lr", "betas", "eps", "weight_decay")


class HostSpan(NamedTuple):
    """A span to step in host memory, with its group's options at the start of the step."""

    stepped: SteppedSpan
    state: dict[str, Tensor]
    options: dict[str, Any]


def _step_on_host(
    spans_by_shard: Mapping[FlatShard, Sequence[HostSpan]],
    in_tiles: bool,
    shard: FlatShard,
    gradient: Tensor,
    scalars: HostScalars,
    on_tile: Callable[[Span], None],
) -> None:
    """Step a shard in host memory, with the same bits as torch's step."""
    if scalars.grad_scale is not None and gradient.dtype == torch.float64:
        gradient.div_(scalars.grad_scale)  # the fused kernel would divide in float32
        scalars = scalars._replace(grad_scale=None)
    spans = spans_by_shard.get(shard, ())
    if in_tiles:
        tiled = TiledStep([each.stepped for each in spans], scalars)
        for stepped, state, options in () if tiled.is_skipped else spans:
            tiled.step(stepped, shard.view(gradient, stepped.span), options, state, on_tile)
        return
    for stepped, state, options in spans:
        arguments = {**options}
        arguments["beta1"], arguments["beta2"] = arguments.pop("betas")
        count, start = state["step"].clone(), stepped.span.start
        for chunk in stepped.span.split(_HOST_CHUNK):
            within = slice(chunk.start - start, chunk.stop - start)
            state["step"].copy_(count)  # the kernel increments it, but a step has several chunks
            _adamw(
                [shard.view(shard.param.detach(), chunk)],
                [shard.view(gradient, chunk)],
                [state["exp_avg"][within]],
                [state["exp_avg_sq"][within]],
                [],  # max_exp_avg_sqs, of amsgrad
                [state["step"]],
                fused=True,
                amsgrad=False,
                maximize=False,
                **scalars._asdict(),
                **arguments,
            )
            on_tile(chunk)


class ShardedAdamW(ShardedOptimizerMixin, torch.optim.AdamW):
    """torch's fused AdamW on this rank's shards, which works with any learning-rate scheduler.

    The defaults are common for language models: betas (0.9, 0.95) and weight decay 0.1, unlike
    torch's (0.9, 0.999) and 0.01. Vectors and scalars (norms, biases) that are in no group of
    `param_groups` have no weight decay. Each rank stores Adam's moments of its shards only.

    With a `state_dtype` or 24-bit masters, the optimizer steps tiles instead of full shards, with
    the same bits on any number of ranks.
    """

    steps_on_host = True

    def __init__(
        self,
        model: ShardedModelProtocol,
        *,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        param_groups: Sequence[Mapping[str, Any]] = (),
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """Create an optimizer for all trainable parameters of `model`.

        Args:
            model: A sharded model.
            lr: The learning rate.
            betas: The decay rates of the first and second moment.
            eps: The constant added to the denominator.
            weight_decay: The decoupled decay of parameters with at least two dimensions.
            param_groups: More groups as `{"names": [...], "lr": ..., ...}`. Missing options have
                the values above, also for vectors and scalars.
            state_dtype: The dtype of the moments: float32, or int8 with a scale per 64 elements. By
                default the dtype of the masters, and float32 for 24-bit masters. The moments of
                vectors, and of parameters with fewer than 4096 elements, are float32.

        Raises:
            UsageError: If a group names an unknown parameter, or for another `state_dtype`.
        """
        require_sharded(model, type(self).__name__)
        requested = None if state_dtype is None else str(state_dtype).removeprefix("torch.")
        if requested not in (None, *STATE_DTYPES):
            raise UsageError(f"state_dtype={requested}: expected {', '.join(STATE_DTYPES)}")
        masters = (
            str(shard.dtype).removeprefix("torch.") if shard.remainder is None else SPLIT
            for shard in trainable_shards(model)
        )
        tiled = tiled_dtype(requested, masters)  # None: torch's kernel steps, not tiles
        self._tiled_dtype: torch.dtype | None = None if tiled is None else getattr(torch, tiled)
        self.splits_compressible = self._tiled_dtype not in (None, torch.float32)
        groups = self._param_groups(model, param_groups)
        options: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, lr=lr, fused=True, **options)

    def _new_state(self, stepped: SteppedSpan) -> dict[str, Tensor]:
        host, make = self._model.host, partial(self._zeros, stepped)
        return make() if host is None else host.call(make)

    def _zeros(self, stepped: SteppedSpan) -> dict[str, Tensor]:
        param = stepped.param
        dtype = self._tiled_dtype or param.dtype
        if self.splits_compressible and not stepped.is_compressible:
            dtype = torch.float32
        states = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
        for name, codes in _CODE_DTYPES.items():
            moment_dtype = codes if dtype == torch.int8 else dtype
            states |= new_moment(name, param.numel(), param.detach(), moment_dtype)
        return states

    def _step_spans(self) -> None:
        if self._tiled_dtype is None:
            super()._step_spans()
            return
        pairs = [(x, x.param.grad) for x in self.spans if x.param.grad is not None]
        scalars = HostScalars(self.grad_scale, self.found_inf)
        tiled = TiledStep([stepped for stepped, _ in pairs], scalars, is_fused=True)
        for stepped, gradient in pairs:
            state = self._state_of(stepped)
            if not tiled.is_skipped:
                tiled.step(stepped, gradient, self.param_groups[stepped.group_index], state)

    def _start_step(self, host: HostStepper, absent: frozenset[str], scalars: HostScalars) -> None:
        """Start to step each shard in host memory, with the current options of the groups."""
        by_shard: dict[FlatShard, list[HostSpan]] = defaultdict(list)
        for stepped in self.spans:
            if stepped.shard.has_grad and not (absent and stepped.names <= absent):
                group = self.param_groups[stepped.group_index]
                options = {name: group[name] for name in _OPTIONS}
                span = HostSpan(stepped, self._state_of(stepped), options)
                by_shard[stepped.shard].append(span)
        host.start(partial(_step_on_host, dict(by_shard), self._tiled_dtype is not None), scalars)
