"""Traces the allocations and operators of a pass through a module on the meta device."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpctl.errors import UsageError
from fsdpctl.estimate.observed_work import work_of
from fsdpctl.estimate.operators import Choices, cpu_nbytes, cuda_workspace, operators_of
from fsdpctl.models.describe import dtype_name
from fsdpctl.models.operators import OPERATORS
from fsdpctl.models.quantized import UNPACK, unpack
from fsdpctl.predict.compute import (
    Gone,
    Gradient,
    Happening,
    Kept,
    Made,
    Part,
    Pass,
    Passing,
    PassPosition,
    Work,
)
from fsdpctl.predict.hardware import UNPACKING
from fsdpctl.predict.memory_recorder import without_gc


class _Recorder(TorchDispatchMode):
    """Records which storages are allocated and freed."""

    def __init__(self, device: str, kernel: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.place = PassPosition(Part.BEFORE)
        self.number = 0  # of the pass
        self.counts = False  # the work of the pass
        self.parts: dict[PassPosition, list[Happening]] = {}
        self.work: dict[PassPosition, list[Work]] = {}
        self._made: dict[tuple[int, PassPosition], list[Made]] = {}  # by pass and place
        self._is_cuda, self._kernel = device == "cuda", kernel
        # By storage: pass, place, number.
        self._known: dict[int, tuple[int, PassPosition, int]] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._muted: set[int] = set()
        self._doubts: set[int] = set()  # storages of results of `any`
        self._choices = Choices(is_cuda=self._is_cuda)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would enter and leave it for each operator

    def begin_pass(self) -> None:
        self.number += 1
        self.parts, self.work = {}, {}
        self.go_to(PassPosition(Part.BEFORE))

    def go_to(self, place: PassPosition) -> None:
        self.place = place
        self.parts.setdefault(place, [])

    def mute(self, tensor: Tensor) -> None:
        self._muted.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._assumed(args[0])
        if func is UNPACK:
            self._unpack(*args)
            return None
        if (function := OPERATORS.get(func)) is not None:
            with self:
                return function(*args)
        result = self._choices.result_of(func, args, kwargs or {})
        if self.counts and (work := work_of(func, args, kwargs, result)) is not None:
            self.work.setdefault(self.place, []).append(work)
        if isinstance(result, Tensor):
            if func is torch.ops.aten.any.default:
                self._doubts.add(result.untyped_storage()._cdata)
            self._see(result, func, args)
        elif result is not None:
            for each in result if isinstance(result, tuple | list) else tree_leaves(result):
                if isinstance(each, Tensor):
                    self._see(each, func, args)
        if self._is_cuda and (nbytes := cuda_workspace(func, args, self._kernel)):
            self.parts[self.place].append(Passing(nbytes, str(func)))
        return result

    def _unpack(self, target: Tensor, rows: Tensor, blocks: int, times: int, packing: str) -> None:
        """Run one of several equal parts, each of which gives its memory back."""
        found = self.work.setdefault(self.place, [])
        before = len(found)
        with self:
            unpack(target.chunk(times)[0], rows.chunk(times)[0], blocks, 1, packing)
        part = [each._replace(name=UNPACKING + packing) for each in found[before:]]
        found[before:] = times * part

    def _assumed(self, tensor: Tensor) -> bool | int:
        """Return what a module reads: `all` is true, `any` is false, the place of an expert is 0.

        Libraries use these to check whether a mask masks anything, or a number is not finite.
        """
        if tensor.dtype != torch.bool:
            return self._choices.place_in(tensor)
        return tensor.untyped_storage()._cdata not in self._doubts

    def _see(self, tensor: Tensor, func: Any, inputs: Sequence[Any]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._muted or not storage.nbytes():
            return
        if self._is_cuda and tensor.device.type == "cpu":
            return  # in host memory on CUDA too, such as the seed of a mask
        happenings = self.parts[self.place]
        made = self._made.setdefault((self.number, self.place), [])
        dtype = dtype_name(tensor.dtype)
        shape = ",".join(map(str, tensor.shape))  # without spaces, where lines wrap
        what = f"{func._schema.name.removeprefix('aten::')} {dtype} [{shape}]"
        nbytes = storage.nbytes() if self._is_cuda else cpu_nbytes(func, inputs, tensor)
        entry = Made(len(made), nbytes, what)
        made.append(entry)
        happenings.append(entry)
        self._known[key] = (self.number, self.place, entry.number)
        self._watches[key] = weakref.ref(storage, partial(self._gone, key))

    def _gone(self, key: int, _: object) -> None:
        del self._watches[key]
        number, place, index = self._known.pop(key)
        self.parts[self.place].append(Gone(place, index, is_old=number != self.number))

    def became_gradient(self, name: str, gradient: Tensor) -> None:
        key = gradient.untyped_storage()._cdata
        if key in self._known:
            _, place, index = self._known[key]
            self.parts[self.place].append(Gradient(place, index, name))

    def disown(self, gradient: Tensor) -> None:
        """Leave a gradient to the engine, which frees it."""
        key = gradient.untyped_storage()._cdata
        if key in self._known:
            del self._watches[key], self._known[key]

    def passed(self) -> Pass:
        """Return the last pass; like tensors that outlive their passes are one and the same."""
        alive = sorted(self._known.values())
        outliving: dict[tuple[PassPosition, str], list[int]] = {}
        for number, place, index in alive:
            if number == self.number:
                what = self._made[number, place][index].what
                outliving.setdefault((place, what), []).append(index)

        def renumbered(each: Happening) -> list[Happening]:
            if not (isinstance(each, Gone) and each.is_old):
                return [each]
            entry = self._made[self.number - 1, each.place][each.number]
            like = outliving.get((each.place, entry.what))  # none if only every second pass has it
            return [each._replace(number=like.pop(0))] if like else []

        parts = {
            place: [each for happening in happenings for each in renumbered(happening)]
            for place, happenings in self.parts.items()
        }
        kept = []
        for number, place, index in alive:
            if number != self.number:
                entry = self._made[number, place][index]
                kept.append(Kept(place, entry.nbytes, entry.what))
        return Pass(parts, tuple(kept), self.work)


class _Hooks:
    """Hooks that set the recorder's place in the pass."""

    def __init__(self, recorder: _Recorder, module: nn.Module, units: Sequence[str]) -> None:
        self._recorder = recorder
        self._params = dict(module.named_parameters())
        self._seen: set[PassPosition] = set()
        self._handles = [
            handle for name in units for handle in self._hook(name, module.get_submodule(name))
        ]
        self._handles += [
            module.register_forward_pre_hook(lambda *_: self._enter(PassPosition(Part.START))),
            module.register_forward_hook(lambda *_: self._enter(PassPosition(Part.LOSS))),
        ]
        for name, param in self._params.items():
            if param.requires_grad:
                hook = partial(self._arrived, name)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_pass(self) -> None:
        self._seen.clear()
        self._recorder.begin_pass()

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        def before(module: nn.Module, args: Any) -> None:
            self._enter(PassPosition(Part.FORWARD, name))

        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda gradient: self._begin_backward(name))
            self._enter(PassPosition(Part.AROUND, name))

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _enter(self, place: PassPosition) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if place in self._seen:
            raise UsageError(
                f"{place.unit or 'the module'} runs more than once in a forward: its memory cannot "
                "be estimated"
            )
        self._seen.add(place)
        self._recorder.go_to(place)

    def _begin_backward(self, name: str) -> None:
        place = PassPosition(Part.BACKWARD, name)
        if place in self._seen:
            return
        if not any(each.part is Part.BACKWARD for each in self._seen):
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._seen.add(place)
        self._recorder.go_to(place)

    def end_pass(self) -> None:
        """End the pass if no unit had a backward."""
        if self._recorder.place.part is not Part.END:
            self._end()

    def _arrived(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        self._recorder.became_gradient(name, param.grad)

    def _end(self) -> None:
        self._recorder.go_to(PassPosition(Part.END))
        for param in self._params.values():
            if param.grad is not None:
                self._recorder.disown(param.grad)
                param.grad = None


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep torch's meta kernels from importing its compiler, which takes most of a second.

    They use it only to mark themselves as not to be compiled, and nothing is compiled here.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    marked: list[Any] = []

    def disable(function: Any, recursive: bool = True, *, wrapping: bool = True) -> Any:
        marked.append(function)
        return function

    stand_in = ModuleType("torch._dynamo")
    config = SimpleNamespace(error_on_nested_fx_trace=False, patch=lambda **_: nullcontext())
    stand_in.__dict__.update(disable=disable, config=config)
    sys.modules["torch._dynamo"] = stand_in
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torch._dynamo"], torch.__dict__["_dynamo"]
        for function in marked:
            function.__dict__.pop("__dynamo_disable", None)


def trace(
    module: nn.Module,
    units: Sequence[str],
    run: Callable[[], object],
    device: str,
    kernel: str | None = None,
) -> Pass:
    """Trace one pass that is not the first, cut at `units`, with the operators of `device`.

    `module` is on the meta device, with its parameters in the compute dtype. `run` runs a forward
    and its backward; its result lives until the next call has returned.
    """
    recorder = _Recorder(device, kernel)
    for tensor in (*module.parameters(), *module.buffers()):
        recorder.mute(tensor)
    hooks = _Hooks(recorder, module, units)
    try:
        with (
            without_gc(),
            _without_compiler(),
            operators_of(device, kernel),
            torch.device("meta"),
            recorder,
        ):
            held = None
            for recorder.counts in (False, True):
                hooks.begin_pass()
                held = run()
                hooks.end_pass()
        passed = recorder.passed()
        del held
    finally:
        hooks.remove()
    return passed
