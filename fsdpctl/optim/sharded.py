"""What torch's fused optimizers need to step flat shards."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.errors import EngineError, UsageError, nearest
from fsdpctl.plan.layout import ParamSpec, Span
from fsdpctl.plan.runs import decay_group, optimizer_runs
from fsdpctl.shards import FlatShard, Sharded, require_sharded, trainable_shards


@dataclass(frozen=True, slots=True)
class SteppedRun:
    """A stretch of a shard that the optimizer sees as one parameter."""

    shard: FlatShard
    span: Span  # in the flat buffer
    names: frozenset[str]  # of the parameters in it
    param: nn.Parameter  # a window into the shard's master
    window: slice | None  # where it lies in that; None for all of it

    def gradient(self) -> Tensor | None:
        """Its part of the shard's gradient."""
        gradient = self.shard.grad
        if gradient is None or self.window is None:
            return gradient
        return gradient[self.window]


class ShardedSteps(torch.optim.Optimizer):
    """Steps this rank's shards; to be put before one of torch's optimizers."""

    runs: tuple[tuple[SteppedRun, int], ...]  # with the number of the group of each

    def _divided(
        self, model: Sharded, param_groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The groups that torch's optimizer is made of.

        Raises:
            UsageError: one names a parameter that the model does not have.
        """
        require_sharded(model, type(self).__name__)
        self._model = model
        group_of = _group_numbers(model, param_groups)
        self.runs = _make_runs(model, group_of)
        options = [
            {},
            {"weight_decay": 0.0},
            *({key: value for key, value in g.items() if key != "names"} for g in param_groups),
        ]
        groups: list[dict[str, Any]] = [{"params": [], **each} for each in options]
        for run, group in self.runs:
            groups[group]["params"].append(run.param)
        return groups

    def _before_step(self) -> None:
        """Once gradients are there."""

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's overloads differ by closure only
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> float | None:
        """Step every shard with its mean gradient, then let the model see the new weights.

        Args:
            closure: as in torch.
            grad_scale: a float32 scalar that gradients are divided by.
            found_inf: a float32 scalar; unless it is zero nothing is stepped.
        """
        if hasattr(self, "found_inf"):  # from somebody who wraps the step
            raise EngineError(
                "GradScaler: is for fp16 gradients, which are not offered; bf16 needs no scaling: "
                "Precision(param_dtype=torch.bfloat16)"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._model.sync_gradients()
        absent = self._model.absent_everywhere()
        if absent:
            self.isolate(absent)
        for run, _ in self.runs:
            run.param.grad = None if absent and run.names <= absent else run.gradient()
        self._before_step()
        self.grad_scale, self.found_inf = _fused_scalars(self.runs, grad_scale, found_inf)
        super().step()  # of the optimizer behind it
        del self.grad_scale, self.found_inf
        self._model.broadcast_updated_params(trained_only=True)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; none is set to zero, whatever `set_to_none` says."""
        self._model.drop_gradients()
        for run, _ in self.runs:
            run.param.grad = None

    def memory_bytes(self) -> int:
        """Bytes of this rank's optimizer states."""
        return sum(
            value.nbytes
            for state in self.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    def isolate(self, names: Collection[str]) -> None:
        """Step the named parameters as tensors of their own from now on.

        A parameter without gradients is left alone, its step counter included, so it cannot share
        a tensor with others any more. States move along.
        """
        runs: list[tuple[SteppedRun, int]] = []
        for run, group in self.runs:
            if len(run.names) == 1 or run.names.isdisjoint(names):
                runs.append((run, group))
                continue
            state = self.state.pop(run.param, {})
            order = {name: place for place, name in enumerate(sorted(run.names))}
            each_alone = partial(_place, order)
            for part in optimizer_runs(run.shard.layout, run.span, each_alone):
                piece = _stepped_run(run.shard, part.span)
                runs.append((piece, group))
                if state:
                    self.state[piece.param] = _state_within(state, run.span, part.span)
        self.runs = tuple(runs)
        for number, about in enumerate(self.param_groups):
            about["params"] = [run.param for run, group in runs if group == number]

    def run_states(self) -> Iterator[tuple[SteppedRun, dict[str, Tensor]]]:
        """Each run and its states, by torch's names; empty before the first step."""
        for run, _ in self.runs:
            yield run, self.state[run.param]


def _fused_scalars(
    runs: Sequence[tuple[SteppedRun, int]], grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The fused kernel reads float32 scalars: for float64 gradients divide beforehand."""
    if grad_scale is None:
        return None, found_inf
    grads = [run.param.grad for run, _ in runs if run.param.grad is not None]
    if any(grad.dtype == torch.float64 for grad in grads):
        torch._foreach_div_(grads, grad_scale)
        return None, found_inf
    return grad_scale.float(), found_inf


def _group_numbers(
    model: Sharded, param_groups: Sequence[Mapping[str, Any]]
) -> Callable[[ParamSpec], int]:
    for group in param_groups:
        if "names" not in group:
            raise UsageError(
                'param_groups: each is {"names": [...], ...} with names of parameters, and has '
                f"{', '.join(map(str, group))}"
            )
    chosen = {
        name: number
        for number, group in enumerate(param_groups, start=2)
        for name in group["names"]
    }
    known = {param.name for shard in trainable_shards(model) for param in shard.layout.params}
    for name in chosen:
        if name not in known:
            raise UsageError(f"param_groups: no trainable parameter {name}{nearest(name, known)}")

    def group_of(param: ParamSpec) -> int:
        return chosen.get(param.name, decay_group(param))

    return group_of


def _make_runs(
    model: Sharded, group_of: Callable[[ParamSpec], int]
) -> tuple[tuple[SteppedRun, int], ...]:
    return tuple(
        (_stepped_run(shard, run.span), run.group)
        for shard in trainable_shards(model)
        for run in optimizer_runs(shard.layout, shard.held, group_of)
    )


def _place(order: Mapping[str, int], param: ParamSpec) -> int:
    return order[param.name]


def _stepped_run(shard: FlatShard, span: Span) -> SteppedRun:
    names = frozenset(piece.param.name for piece in shard.layout.pieces(span))
    within = span.shift(-shard.held.start)
    window = None if span == shard.held else slice(within.start, within.stop)
    return SteppedRun(shard, span, names, nn.Parameter(shard.view(shard.master, span)), window)


def _state_within(state: Mapping[str, Tensor], whole: Span, part: Span) -> dict[str, Tensor]:
    inside = slice(part.start - whole.start, part.stop - whole.start)
    return {
        name: values.clone() if values.ndim == 0 else values[inside].clone()
        for name, values in state.items()
    }
