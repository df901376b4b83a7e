"""The common part of the optimizers, which step flat shards with torch's fused kernels."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.comm.flat_shard import (
    FlatShard,
    HostScalars,
    HostStepper,
    ShardedModelProtocol,
    require_sharded,
    trainable_shards,
)
from fsdpctl.comm.quantized_states import SCALES
from fsdpctl.errors import EngineError, UsageError, did_you_mean
from fsdpctl.plan.layout import ParamSpec, Span, decay_group, optimizer_spans
from fsdpctl.plan.optimizers import SCALE_BLOCK, is_compressible, span_group


@dataclass(frozen=True, slots=True)
class SteppedSpan:
    """A span of a shard that the optimizer steps as one parameter."""

    shard: FlatShard
    span: Span  # elements of the flat buffer
    names: frozenset[str]  # names of the parameters in the span
    param: nn.Parameter  # a view of the shard's master
    separate_param: ParamSpec | None = None  # the only parameter, if it is stepped separately

    @property
    def is_compressible(self) -> bool:
        """Whether a state dtype other than float32 applies to its parameters."""
        return is_compressible(self.shard.layout.param_slices(self.span)[0].param)

    def gradient(self) -> Tensor | None:
        gradient = self.shard.grad
        return None if gradient is None else self.shard.view(gradient, self.span)


class ShardedOptimizerMixin(torch.optim.Optimizer):
    """A mixin that makes a torch optimizer step this rank's shards."""

    spans: tuple[tuple[SteppedSpan, int], ...]  # spans, each with the index of its group
    steps_on_host = False  # whether the optimizer can step master weights in host memory
    splits_compressible = False  # whether spans end between compressible and other parameters

    def _param_groups(
        self, model: ShardedModelProtocol, param_groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Set `spans`, and return the parameter groups for torch's optimizer.

        UsageError if a group names an unknown parameter, or masters are in host memory and the
        optimizer does not support that.
        """
        require_sharded(model, type(self).__name__)
        if model.host is not None and not self.steps_on_host:
            raise UsageError(f"{type(self).__name__}: not supported with offload; use ShardedAdamW")
        self._model = model
        group_of = _group_numbers(model, param_groups)
        keys = (
            (lambda each: span_group(each, group_of(each)))
            if self.splits_compressible
            else group_of
        )
        self.spans = tuple(
            (
                _stepped_span(shard, run.span, run.separate_param),
                run.group // (1 + self.splits_compressible),
            )
            for shard in trainable_shards(model)
            for run in optimizer_spans(shard.layout, shard.span, keys, self._is_separate)
        )
        options = [
            {},
            {"weight_decay": 0.0},
            *({key: value for key, value in g.items() if key != "names"} for g in param_groups),
        ]
        groups: list[dict[str, Any]] = [{"params": [], **each} for each in options]
        for run, group in self.spans:
            groups[group]["params"].append(run.param)
        return groups

    def _is_separate(self, param: ParamSpec) -> bool:
        return False

    def _new_state(self, run: SteppedSpan, group: Mapping[str, Any]) -> dict[str, Tensor]:
        raise NotImplementedError

    def create_states(self) -> None:
        for run, group in self.spans:
            if not (state := self.state[run.param]):
                state.update(self._new_state(run, self.param_groups[group]))

    def _before_step(self) -> None:
        """Run before torch's step, when gradients are complete and `found_inf` is set."""

    def _step_spans(self) -> None:
        super().step()  # torch's optimizer

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's overloads differ by closure only
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> float | None:
        """Step every shard with its mean gradient, and send the new weights to other ranks.

        Gradients are divided by `grad_scale`. If `found_inf` is not zero, the step is skipped. Both
        are float32 scalars.
        """
        if hasattr(self, "found_inf"):  # set by a wrapper of the step
            way = "use bf16, which needs no scaling: Precision(param_dtype=torch.bfloat16)"
            raise EngineError(f"GradScaler: fp16 gradients are not supported; {way}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._model.sync_gradients()
        absent = self._model.params_without_grad()
        if absent:
            self.separate_params(absent)
        self._model.mesh.shard.wait_for_readers()
        host = self._model.host
        if host is not None:
            self._start_step(host, absent, HostScalars(grad_scale, found_inf))
            return loss
        for run, _ in self.spans:
            run.param.grad = None if absent and run.names <= absent else run.gradient()
        self.grad_scale, self.found_inf = _fused_scalars(self.spans, grad_scale, found_inf)
        try:
            self._before_step()
            self._step_spans()
        finally:
            del self.grad_scale, self.found_inf
        self._model.broadcast_updated_params(trained_only=True)
        return loss

    def _start_step(self, host: HostStepper, absent: frozenset[str], scalars: HostScalars) -> None:
        raise NotImplementedError

    def _synchronize(self) -> None:
        if self._model.host is not None:
            self._model.host.synchronize()

    def state_dict(self) -> dict[str, Any]:
        self._synchronize()
        return super().state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.drop_gradients()
        for run, _ in self.spans:
            run.param.grad = None

    def memory_bytes(self) -> int:
        values = (value for state in self.state.values() for value in state.values())
        return sum(each.nbytes for each in values if isinstance(each, Tensor))

    def separate_params(self, names: Collection[str]) -> None:
        """Step each of the named parameters as a separate tensor from now on.

        A parameter without a gradient is not stepped, and its step counter does not change. So it
        cannot share a tensor, and its counter, with other parameters. States are split accordingly.
        """
        self._synchronize()
        spans: list[tuple[SteppedSpan, int]] = []
        all_names = sorted(frozenset().union(*(run.names for run, _ in self.spans)))
        order = {name: index for index, name in enumerate(all_names)}
        for run, group in self.spans:
            if len(run.names) == 1 or run.names.isdisjoint(names):
                spans.append((run, group))
                continue
            state = self.state.pop(run.param, {})
            for part in optimizer_spans(run.shard.layout, run.span, lambda p: order[p.name]):
                piece = _stepped_span(run.shard, part.span)
                spans.append((piece, group))
                if state:
                    self.state[piece.param] = _state_within(state, run.span, part.span)
        self.spans = tuple(spans)
        for group_index, group_options in enumerate(self.param_groups):
            group_options["params"] = [run.param for run, group in spans if group == group_index]

    def span_states(self) -> Iterator[tuple[SteppedSpan, dict[str, Tensor]]]:
        """Yield each span and its states, by torch's names; empty before the first step."""
        self._synchronize()
        for run, _ in self.spans:
            yield run, self.state[run.param]


def _fused_scalars(
    runs: Sequence[tuple[SteppedSpan, int]], grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the float32 scalars for the fused kernel, after a division of float64 gradients.

    The kernel would divide float64 gradients in float32.
    """
    if grad_scale is None:
        return None, found_inf
    grads = [run.param.grad for run, _ in runs if run.param.grad is not None]
    if any(grad.dtype == torch.float64 for grad in grads):
        torch._foreach_div_(grads, grad_scale)
        return None, found_inf
    return grad_scale.float(), found_inf


def _group_numbers(
    model: ShardedModelProtocol, param_groups: Sequence[Mapping[str, Any]]
) -> Callable[[ParamSpec], int]:
    for group in param_groups:
        if "names" not in group:
            raise UsageError(
                'param_groups: expected {"names": [...], ...} with names of parameters, got the '
                f"keys {', '.join(map(str, group))}"
            )
    groups = enumerate(param_groups, start=2)
    group_of = {name: index for index, group in groups for name in group["names"]}
    trainable = {param.name for shard in trainable_shards(model) for param in shard.layout.params}
    for name in group_of:
        if name not in trainable:
            raise UsageError(
                f"param_groups: no trainable parameter {name}{did_you_mean(name, trainable)}"
            )
    return lambda param: group_of.get(param.name, decay_group(param))


def _stepped_span(
    shard: FlatShard, span: Span, separate_param: ParamSpec | None = None
) -> SteppedSpan:
    names = frozenset(piece.param.name for piece in shard.layout.param_slices(span))
    param = nn.Parameter(shard.view(shard.master, span))
    param.grad_dtype = shard.grad_dtype
    return SteppedSpan(shard, span, names, param, separate_param)


def _state_within(state: Mapping[str, Tensor], state_span: Span, span: Span) -> dict[str, Tensor]:
    within = span.shift(-state_span.start)
    inside, blocks = (slice(within.start // n, within.stop // n) for n in (1, SCALE_BLOCK))
    return {
        name: (values if not values.ndim else values[blocks if SCALES in name else inside]).clone()
        for name, values in state.items()
    }
