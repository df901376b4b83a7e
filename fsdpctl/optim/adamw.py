"""AdamW over flat shards."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as _adamw

from fsdpctl.optim.sharded import ShardedSteps, SteppedRun
from fsdpctl.plan.layout import Span
from fsdpctl.shards import FlatShard, HostScalars, HostSteps, Sharded

# Elements that are stepped at a time in host memory: with moments and gradient 8 MiB, as many as
# stay in the cache until they are cast.
_AT_A_TIME = 1 << 19
_OPTIONS = ("lr", "betas", "eps", "weight_decay")


class HostRun(NamedTuple):
    """A run to step in host memory, and the options of its group when the step began."""

    run: SteppedRun
    state: dict[str, Tensor]
    options: dict[str, Any]


def _update(
    of_shard: Mapping[FlatShard, Sequence[HostRun]],
    shard: FlatShard,
    gradient: Tensor,
    scalars: HostScalars,
    written: Callable[[Span], None],
) -> None:
    """Step a shard in host memory; the bits are those of torch's step."""
    if scalars.grad_scale is not None and gradient.dtype == torch.float64:
        gradient.div_(scalars.grad_scale)  # the fused kernel would divide in float32
        scalars = scalars._replace(grad_scale=None)
    for run, state, options in of_shard.get(shard, ()):
        count = state["step"].clone()
        for start in range(run.span.start, run.span.stop, _AT_A_TIME):
            span = Span(start, min(start + _AT_A_TIME, run.span.stop))
            within = slice(span.start - run.span.start, span.stop - run.span.start)
            state["step"].copy_(count)  # counts once for all pieces
            _adamw(
                [shard.view(shard.param.detach(), span)],
                [shard.view(gradient, span)],
                [state["exp_avg"][within]],
                [state["exp_avg_sq"][within]],
                [],
                [state["step"]],
                fused=True,
                grad_scale=scalars.grad_scale,
                found_inf=scalars.found_inf,
                amsgrad=False,
                beta1=options["betas"][0],
                beta2=options["betas"][1],
                lr=options["lr"],
                weight_decay=options["weight_decay"],
                eps=options["eps"],
                maximize=False,
            )
            written(span)


class ShardedAdamW(ShardedSteps, torch.optim.AdamW):
    """torch's fused AdamW on this rank's shards, which works with any learning-rate scheduler.

    Its defaults are common for language models: betas 0.9 and 0.95 and weight decay 0.1, unlike
    0.999 and 0.01 in torch. Vectors and scalars (norms, biases) that are in no group of
    `param_groups` have no weight decay. Each rank keeps Adam's moments of its shards only, in the
    masters' dtype.
    """

    def __init__(
        self,
        model: Sharded,
        *,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        param_groups: Sequence[Mapping[str, Any]] = (),
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

        Raises:
            UsageError: If a group names an unknown parameter.
        """
        groups = self._divided(model, param_groups)
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def _start_on_host(self, host: HostSteps, absent: frozenset[str], scalars: HostScalars) -> None:
        """Start to step each shard in host memory, with the options that the groups have now."""
        of_shard: dict[FlatShard, list[HostRun]] = defaultdict(list)
        for run, number in self.runs:
            if not run.shard.has_grad or (absent and run.names <= absent):
                continue
            group = self.param_groups[number]
            if not (state := self.state[run.param]):
                state.update(self._new_state(run.param, group))
            of_shard[run.shard].append(
                HostRun(run, state, {name: group[name] for name in _OPTIONS})
            )
        host.start(partial(_update, dict(of_shard)), scalars)

    def _new_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        host, make = self._model.host, partial(_zeros, param.detach())
        return make() if host is None else host.call(make)


def _zeros(param: Tensor) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=param.device)
    moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": step, **moments}
