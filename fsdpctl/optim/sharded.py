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
    group_index: int  # index in `param_groups`
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

    spans: tuple[SteppedSpan, ...]
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
        # Numbers of `span_group` are twice the index of the group, plus one if compressible.
        key, divisor = group_of, 1
        if self.splits_compressible:
            key, divisor = (lambda each: span_group(each, group_of(each))), 2
        self.spans = tuple(
            _stepped_span(shard, part.span, part.group // divisor, part.separate_param)
            for shard in trainable_shards(model)
            for part in optimizer_spans(shard.layout, shard.span, key, self._is_separate)
        )
        # Groups 0 and 1 are those of `decay_group`.
        options: list[Mapping[str, Any]] = [{}, {"weight_decay": 0.0}, *param_groups]
        groups: list[dict[str, Any]] = [{"params": [], **each} for each in options]
        for group in groups:
            group.pop("names", None)
        for stepped in self.spans:
            groups[stepped.group_index]["params"].append(stepped.param)
        return groups

    def _is_separate(self, param: ParamSpec) -> bool:
        return False

    def _new_state(self, stepped: SteppedSpan) -> dict[str, Tensor]:
        raise NotImplementedError

    def _state_of(self, stepped: SteppedSpan) -> dict[str, Tensor]:
        """Return the states of a span; create them before its first step."""
        state: dict[str, Tensor] = self.state[stepped.param]
        if not state:
            state.update(self._new_state(stepped))
        return state

    def create_states(self) -> None:
        for stepped in self.spans:
            self._state_of(stepped)

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

        Gradients are divided by the float32 scalar `grad_scale`. Another one, `found_inf`, skips
        the step if it is not zero.
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
        for each in self.spans:
            each.param.grad = None if absent and each.names <= absent else each.gradient()
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
        for stepped in self.spans:
            stepped.param.grad = None

    def memory_bytes(self) -> int:
        values = (value for state in self.state.values() for value in state.values())
        return sum(each.nbytes for each in values if isinstance(each, Tensor))

    def separate_params(self, names: Collection[str]) -> None:
        """Step each of the named parameters as a separate tensor from now on.

        A parameter without a gradient is not stepped, and its step counter does not change. So it
        cannot share a tensor, and its counter, with other parameters. States are split accordingly.
        """
        self._synchronize()
        spans: list[SteppedSpan] = []
        all_names = sorted(frozenset().union(*(stepped.names for stepped in self.spans)))
        # A group per name, so that spans end between parameters.
        group_of = {name: index for index, name in enumerate(all_names)}
        for stepped in self.spans:
            if len(stepped.names) == 1 or stepped.names.isdisjoint(names):
                spans.append(stepped)
                continue
            state = self.state.pop(stepped.param, {})
            shard = stepped.shard
            for part in optimizer_spans(shard.layout, stepped.span, lambda p: group_of[p.name]):
                spans.append(_stepped_span(shard, part.span, stepped.group_index))
                if state:
                    self.state[spans[-1].param] = _state_within(state, stepped.span, part.span)
        self.spans = tuple(spans)
        for group_index, group in enumerate(self.param_groups):
            group["params"] = [x.param for x in spans if x.group_index == group_index]

    def span_states(self) -> Iterator[tuple[SteppedSpan, dict[str, Tensor]]]:
        """Yield each span and its states, by torch's names; empty before the first step."""
        self._synchronize()
        for stepped in self.spans:
            yield stepped, self.state[stepped.param]


def _fused_scalars(
    spans: Sequence[SteppedSpan], grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scalars for the fused kernel.

    Divides float64 gradients here: the kernel would divide them in float32.
    """
    if grad_scale is None:
        return None, found_inf
    grads = [each.param.grad for each in spans if each.param.grad is not None]
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
    # Groups 0 and 1 are those of `decay_group`.
    groups = enumerate(param_groups, start=2)
    group_of = {name: index for index, group in groups for name in group["names"]}
    trainable = {param.name for shard in trainable_shards(model) for param in shard.layout.params}
    for name in group_of:
        if name not in trainable:
            hint = did_you_mean(name, trainable)
            raise UsageError(f"param_groups: no trainable parameter {name}{hint}")
    return lambda param: group_of.get(param.name, decay_group(param))


def _stepped_span(
    shard: FlatShard, span: Span, group_index: int, separate_param: ParamSpec | None = None
) -> SteppedSpan:
    names = frozenset(piece.param.name for piece in shard.layout.param_slices(span))
    param = nn.Parameter(shard.view(shard.master, span))
    param.grad_dtype = shard.grad_dtype
    return SteppedSpan(shard, span, names, param, group_index, separate_param)


def _state_within(state: Mapping[str, Tensor], state_span: Span, span: Span) -> dict[str, Tensor]:
    within = span.shift(-state_span.start)
    inside = slice(within.start, within.stop)
    blocks = slice(within.start // SCALE_BLOCK, within.stop // SCALE_BLOCK)
    return {
        name: (values if not values.ndim else values[blocks if SCALES in name else inside]).clone()
        for name, values in state.items()
    }
