"""The common part of the optimizers that step flat shards by torch's fused kernels."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.comm.flat_shard import (
    FlatShard,
    HostScalars,
    HostSteps,
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
    """A run of a shard that the optimizer steps as one parameter."""

    shard: FlatShard
    span: Span  # in the flat buffer
    names: frozenset[str]  # of the parameters in it
    param: nn.Parameter  # a window into the shard's master
    separate_param: ParamSpec | None = (
        None  # the parameter that is stepped separately, if it is one
    )

    @property
    def is_compressible(self) -> bool:
        """Whether a state dtype other than float32 applies to its parameters."""
        return is_compressible(self.shard.layout.param_slices(self.span)[0].param)

    def gradient(self) -> Tensor | None:
        gradient = self.shard.grad
        return None if gradient is None else self.shard.view(gradient, self.span)


class ShardedOptimizerMixin(torch.optim.Optimizer):
    """Steps this rank's shards. A base class to put before one of torch's optimizers."""

    spans: tuple[tuple[SteppedSpan, int], ...]  # each with the number of its group
    steps_on_host = False  # master weights that are there
    splits_compressible = False  # between parameters whose states may be compressed and others

    def _param_groups(
        self, model: ShardedModelProtocol, param_groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the groups for torch's optimizer.

        UsageError if a group names an unknown parameter, or the masters are on the host and the
        optimizer does not step them there.
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
                _stepped_run(shard, run.span, run.separate_param),
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
        super().step()  # of the optimizer behind it

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's overloads differ by closure only
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> float | None:
        """Step every shard with its mean gradient, and make the new weights visible to the model.

        Gradients are divided by `grad_scale`; unless `found_inf` is zero, the step is skipped. Both
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
        absent = self._model.absent_everywhere()
        if absent:
            self.separate_params(absent)
        self._model.mesh.shard.wait_for_readers()
        host = self._model.host
        if host is not None:
            self._start_on_host(host, absent, HostScalars(grad_scale, found_inf))
            return loss
        for run, _ in self.spans:
            run.param.grad = None if absent and run.names <= absent else run.gradient()
        self.grad_scale, self.found_inf = _fused_scalars(self.spans, grad_scale, found_inf)
        self._before_step()
        self._step_spans()
        del self.grad_scale, self.found_inf
        self._model.broadcast_updated_params(trained_only=True)
        return loss

    def _start_on_host(self, host: HostSteps, absent: frozenset[str], scalars: HostScalars) -> None:
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
        """Step each of the named parameters as a tensor of its own from now on.

        A parameter without gradients is not stepped and neither is its counter, so it cannot share
        a tensor with others. States are split accordingly.
        """
        self._synchronize()
        runs: list[tuple[SteppedSpan, int]] = []
        known = sorted(frozenset().union(*(run.names for run, _ in self.spans)))
        places = {name: place for place, name in enumerate(known)}
        for run, group in self.spans:
            if len(run.names) == 1 or run.names.isdisjoint(names):
                runs.append((run, group))
                continue
            state = self.state.pop(run.param, {})
            for part in optimizer_spans(run.shard.layout, run.span, lambda p: places[p.name]):
                piece = _stepped_run(run.shard, part.span)
                runs.append((piece, group))
                if state:
                    self.state[piece.param] = _state_within(state, run.span, part.span)
        self.spans = tuple(runs)
        for number, about in enumerate(self.param_groups):
            about["params"] = [run.param for run, group in runs if group == number]

    def span_states(self) -> Iterator[tuple[SteppedSpan, dict[str, Tensor]]]:
        """Yield each run and its states, by torch's names; empty before the first step."""
        self._synchronize()
        for run, _ in self.spans:
            yield run, self.state[run.param]


def _fused_scalars(
    runs: Sequence[tuple[SteppedSpan, int]], grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scalars for the fused kernel, in float32; divide float64 gradients here."""
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
    group_of = {name: number for number, group in groups for name in group["names"]}
    known = {param.name for shard in trainable_shards(model) for param in shard.layout.params}
    for name in group_of:
        if name not in known:
            raise UsageError(
                f"param_groups: no trainable parameter {name}{did_you_mean(name, known)}"
            )
    return lambda param: group_of.get(param.name, decay_group(param))


def _stepped_run(shard: FlatShard, span: Span, alone: ParamSpec | None = None) -> SteppedSpan:
    names = frozenset(piece.param.name for piece in shard.layout.param_slices(span))
    param = nn.Parameter(shard.view(shard.master, span))
    param.grad_dtype = shard.grad_dtype
    return SteppedSpan(shard, span, names, param, alone)


def _state_within(state: Mapping[str, Tensor], whole: Span, part: Span) -> dict[str, Tensor]:
    within = part.shift(-whole.start)
    inside, blocks = (slice(within.start // n, within.stop // n) for n in (1, SCALE_BLOCK))
    return {
        name: (values if not values.ndim else values[blocks if SCALES in name else inside]).clone()
        for name, values in state.items()
    }
