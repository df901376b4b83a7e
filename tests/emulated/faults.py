"""Faults that are planted into the CUDA path, by name, each with the case that detects it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpctl.checkpoint.staging import StagingMemory
from fsdpctl.comm.collectives import AsyncHostCopy, Handle, InPlaceReduction
from fsdpctl.comm.nccl import NcclCollectives
from fsdpctl.engine import offload
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.engine.host_worker import Copier, HostTask
from fsdpctl.engine.offload import HostStates, PinnedRing
from fsdpctl.engine.offloaded_inputs import OffloadedInput
from fsdpctl.engine.runtime import ParamSync
from fsdpctl.engine.unit import HostParamPool, ShardedUnit, UnshardBuffer
from fsdpctl.optim import record
from fsdpctl.optim.adamw import ShardedAdamW
from tests.emulated import cases
from tests.emulated.cases import Case

Plant = Callable[[], None]
HYBRID, ZERO1 = Case("hybrid_shard"), Case("shard_optimizer")
MAPPED, HPZ = replace(ZERO1, owner_map="balanced"), Case("hybrid_shard_optimizer")
DDP, SAVES = Case("no_shard"), Case(saves=True)
STATES = Case(precision="bf16", offload="states")
ALL = Case("shard_grad_op", window="every", offload="states,gradients")
INPUTS = Case("no_shard", sends=True)
PARAMS = Case(offload="params", in_part=True)
STEPPED = Case(precision="bf16", offload="states,params")
STEPPED_FP32 = Case("shard_grad_op", offload="all")
BETWEEN = replace(STEPPED_FP32, looks=True, wide=True)
FAULTS: dict[str, tuple[Case, Plant]] = {}


def fault(*of: Case) -> Callable[[Plant], Plant]:
    def named(plant: Plant) -> Plant:
        for case in of:
            FAULTS[f"{plant.__name__}, {case.strategy}"] = case, plant
        return plant

    return named


def instead(owner: Any, name: str, *of: Case) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that replaces `owner.name` and receives the original first."""

    def named(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def plant() -> None:
            right = getattr(owner, name)
            setattr(owner, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

        for case in of:
            FAULTS[f"{wrong.__name__}, {case.strategy}"] = case, plant
        return wrong

    return named


def _within(owner: type, name: str, target: Any, attribute: str, instead: Any) -> None:
    """Replace `target.attribute` by `instead` while `owner.name` runs."""
    right = getattr(owner, name)

    @wraps(right)
    def wrong(*args: Any, **more: Any) -> Any:
        with mock.patch.object(target, attribute, instead):
            return right(*args, **more)

    setattr(owner, name, wrong)


def _replace(owner: Any, name: str, value: Any) -> None:
    getattr(owner, name)  # fails if the name does not exist
    setattr(owner, name, value)


def _nothing(*args: Any, **more: Any) -> None:
    return None


def _done_at_once(self: NcclCollectives, done: torch.cuda.Event, result: Tensor) -> Handle:
    return Handle(lambda: result)


# Missing waits before and after each kind of collective.
KINDS = {
    "all_gather": (Case(), MAPPED, DDP), "reduce_scatter": (Case(), MAPPED),
    "start_all_reduce": (HYBRID, DDP), "chain": (HYBRID, HPZ),
}  # fmt: skip
for _name, _cases in KINDS.items():
    _waits = (
        (torch.cuda.Stream, "wait_stream", _nothing), (NcclCollectives, "_handle", _done_at_once),
    )  # fmt: skip
    for _case in _cases:
        for _side, _wait in zip(("before", "after"), _waits, strict=True):
            if (_name, _case.strategy) != ("all_gather", "no_shard"):
                plant = partial(_within, NcclCollectives, _name, *_wait)
                FAULTS[f"no wait {_side} {_name}, {_case.strategy}"] = _case, plant


# Calls that do nothing. Most are waits.
for _name, _owner, _call, _case in (
    ("a_gradient_is_freed_before_it_is_copied", offload, "wait_event", ALL),
    ("a_gather_does_not_wait_for_what_replicas_send", ParamSync, "wait", HPZ),
    ("streams_never_wait", torch.cuda.Stream, "wait_stream", Case()),
    ("events_are_never_waited_for", torch.cuda.Stream, "wait_event", Case()),
):
    FAULTS[f"{_name}, {_case.strategy}"] = _case, partial(_replace, _owner, _call, _nothing)


@fault(STATES, STEPPED, STEPPED_FP32)
def a_unit_does_not_wait_for_the_host() -> None:
    right = HostStates._run

    def wrong(self: HostStates, *args: Any) -> None:
        time.sleep(0.2)
        right(self, *args)

    _replace(HostStates, "_run", wrong)
    _replace(HostTask, "wait", _nothing)


# Replaced methods: each function receives the original and its arguments.
_CALLS: tuple[tuple[str, Any, str, tuple[Case, ...], Callable[..., Any]], ...] = (
    ("no_wait_before_copies_to_and_from_the_host", Copier, "_copy",
     (STATES, ALL, INPUTS, PARAMS, STEPPED_FP32), lambda right, *args: right(*args[:-1], None)),
    ("the_host_reads_a_gradient_before_it_has_arrived", HostStates, "_fetch", (STATES,),
     lambda right, *args: (right(*args)[0], None)),
    ("a_unit_is_gathered_before_the_host_has_sent_it", HostTask, "end", (STATES,),
     lambda right, job, ready=None, error=None: right(job, None, error)),
    ("gradients_are_freed_before_the_second_collective", NcclCollectives, "chain", (HYBRID,),
     lambda right, *args: (Handle(lambda: torch.empty(0)), right(*args)[1])),
    ("the_record_is_made_on_the_host", record, "sum_of_squares", (Case(),),
     lambda right, model: right(model).cpu()),
    ("a_part_is_copied_to_the_span_of_another_rank", HostParamPool, "copy_to_device", (PARAMS,),
     lambda right, pool, target, part: right(
         pool, target, part.flip(0) if target.is_cuda else part)),
)  # fmt: skip
for _name, _owner, _call, _in, _wrong in _CALLS:
    _wrong.__name__ = _name
    instead(_owner, _call, *_in)(_wrong)


@instead(PinnedRing, "take", STATES)
def a_pinned_buffer_is_reused_before_the_device_has_read_it(right, self, *args):
    self.in_use_until, self._next = [None] * len(self.in_use_until), 0
    return right(self, *args)


@instead(HostParamPool, "copy_to_device", PARAMS, STEPPED_FP32)
def a_unit_is_gathered_before_its_part_has_arrived(right: Any, self: Any, *args: Any) -> None:
    right(self, *args)


@instead(HostParamPool, "copy_to_device", PARAMS, STEPPED_FP32)
def a_part_is_sent_while_its_target_is_in_use(right: Any, self: HostParamPool, *args: Any) -> Any:
    with mock.patch.object(Copier, "record_event", _nothing):
        return right(self, *args)


@instead(HostStates, "_run", BETWEEN)
def the_host_steps_what_the_device_still_reads(right, self, steps, *args):
    for step in steps:
        step.buffer.shard.param.detach().mul_(1.0)
    right(self, steps, *args)


@instead(cases, "written", BETWEEN)
def masters_are_read_while_the_device_copies_them(right: Any, *args: Any) -> None:
    with mock.patch.object(Copier, "synchronize_to_device", _nothing):
        right(*args)


@instead(HostStates, "_step", STEPPED)
def new_parameters_are_not_cast(right: Any, self: HostStates, step: Any, *args: Any) -> Any:
    before = step.target().clone()
    ready = right(self, step, *args)
    if torch.cuda.current_device() == 0 and step.buffer.full.is_cuda:
        step.target().copy_(before)
    return ready


@instead(HostParamPool, "take", PARAMS)
def units_share_host_memory(_right: Any, self: Any, *options: Any) -> Any:
    result = self._unused[options]
    return result[0] if result[0].is_pinned() else result.pop()


@instead(HostParamPool, "copy_to_device", PARAMS)
def the_host_waits_for_a_copy(_right: Any, self: Any, target: Tensor, part: Tensor) -> None:
    target.copy_(part)


@instead(OffloadedInput, "__exit__", INPUTS)
def an_input_is_freed_before_it_is_copied(right: Any, self: OffloadedInput, *options: Any) -> None:
    self._copy_end = None
    right(self, *options)


@instead(OffloadedInput, "_take", INPUTS)
def a_block_is_recomputed_before_its_input_has_arrived(right: Any, self: OffloadedInput) -> Any:
    self.fetch()
    assert self._fetch_state is not None
    self._fetch_state = self._fetch_state[0], None
    return right(self)


@instead(NcclCollectives, "all_gather", Case())
def own_part_is_copied_on_another_stream(right: Any, self: Any, buffers: Sequence[Any]) -> Any:
    for each in buffers:
        if each.shard is not None:
            with torch.cuda.stream(self.reduce_stream):
                self._own_part(each).copy_(each.shard)
    return right(self, [replace(each, shard=None) for each in buffers])


@instead(ShardedAdamW, "step", Case(), ZERO1)
def the_optimizer_runs_on_another_stream(right, self, *args, **more):
    with torch.cuda.stream(torch.cuda.Stream()):
        return right(self, *args, **more)


@instead(ShardedUnit, "_wait", Case())
def a_unit_is_used_before_its_gather_ends(_right: Any, self: ShardedUnit) -> None:
    self._gather = None


@instead(NcclCollectives, "start_all_reduce", DDP)
def a_collective_uses_memory_that_is_freed_at_once(_right, self, values):
    copy = values.clone()
    self.reduce_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(self.reduce_stream):
        dist.all_reduce(copy, group=self.reduce_group)
    return Handle(lambda: values)


@instead(UnshardBuffer, "__init__", Case())
def an_unshard_buffer_is_on_another_device(right, self, name, memory, **more):
    if memory.is_cuda:
        memory = memory.to(torch.device("cuda", (memory.device.index or 0) + 1))
    right(self, name, memory, **more)


@instead(Case, "train", Case())
def a_device_has_no_index(right, self, rank, world_size, device):
    if device.type == "cuda":
        torch.cuda.set_device(0)  # as in a process that selects no device
    return right(self, rank, world_size, torch.device(device.type))


@fault(ZERO1)
def a_unit_runs_before_its_update_has_arrived() -> None:
    _replace(ParamSync, "begin_forward", _nothing)
    _replace(ParamSync, "begin_unit", _nothing)


@instead(AsyncHostCopy, "__init__", Case())
def figures_are_read_before_they_have_arrived(right: Any, self: Any, values: Tensor) -> None:
    right(self, values)
    self._ready = None


@fault(Case())
def pinned_memory_is_written_while_it_is_sent() -> None:
    pinned = torch.empty((3, 6), dtype=torch.int64, pin_memory=True)
    vars(cases)["to_device"] = lambda batch, device: (
        pinned.copy_(batch).to(device, non_blocking=True) if device.type == "cuda" else batch
    )


@fault(SAVES)
def a_saver_reads_before_its_copies_are_done() -> None:
    _within(StagingMemory, "copy", torch.cuda, "synchronize", _nothing)


@instead(StagingMemory, "copy", SAVES)
def a_saver_copies_while_the_optimizer_writes(right, self, tensors):
    if not tensors[0].is_cuda:
        return right(self, tensors)
    with torch.cuda.stream(torch.cuda.Stream()):
        copies = [each.to("cpu", non_blocking=True) for each in tensors]
    for each in tensors:
        each.mul_(1.0)
    return copies


@instead(record, "sum_of_squares", Case(), DDP)
def the_host_waits_in_a_step(right: Any, model: Any) -> Any:
    result = right(model)
    result.item()
    return result


@instead(GradientReducer, "_add_gradient", Case(), HYBRID)
def a_gradient_counts_twice(right: Any, self: Any, flat: Any) -> None:
    if flat.partial_sum.is_cuda:
        flat.partial_sum.mul_(2)
    right(self, flat)


@instead(NcclCollectives, "reduce_scatter", Case())
def gradients_are_not_reduced(_right: Any, self: Any, full: Tensor, spans: Any) -> InPlaceReduction:
    span = spans[self.rank]
    return InPlaceReduction(Handle(lambda: full[span.start : span.stop]))


@instead(GradientReducer, "__init__", Case())
def gradients_are_summed_instead_of_averaged(right, self, units, mesh, *args):
    right(self, units, mesh, *args)
    if isinstance(mesh.shard, NcclCollectives):
        self._copy_scale = self._sum_scale = 1.0


@instead(NcclCollectives, "all_gather", Case())
def parts_are_shifted_by_an_element(right: Any, self: Any, buffers: Sequence[Any]) -> Any:
    moved = [None if each.shard is None else each.shard.roll(1) for each in buffers]
    rolled = [replace(each, shard=shard) for each, shard in zip(buffers, moved, strict=True)]
    return right(self, rolled)


@instead(Case, "model", Case(precision="bf16"))
def gathers_are_in_fp32(right: Any, self: Case, device: torch.device, world_size: int) -> Any:
    on_device = device.type == "cuda"
    return right(replace(self, precision="fp32") if on_device else self, device, world_size)


@instead(GradientReducer, "_add_gradient", Case(window="every"))
def the_second_micro_batch_is_forgotten(right: Any, self: Any, flat: Any) -> None:
    if flat.buffer.shard.grad is None or not flat.partial_sum.is_cuda:
        right(self, flat)
