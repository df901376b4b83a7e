"""Traces the allocations and operators of a pass through a module on the meta device."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpctl.errors import UsageError
from fsdpctl.estimate.device_operators import (
    AssumedRouting,
    cpu_nbytes,
    cuda_workspace,
    operators_of,
)
from fsdpctl.estimate.operator_work import work_of
from fsdpctl.io.resources import without_gc
from fsdpctl.models.custom_ops import PRODUCT_OPERATORS
from fsdpctl.models.module_spec import dtype_name
from fsdpctl.models.quantized import DEQUANTIZE, dequantize_parts
from fsdpctl.predict.hardware import UNPACKING
from fsdpctl.predict.model_pass import (
    Alloc,
    BecomesGradient,
    CachedTensor,
    Free,
    MemoryEvent,
    PassPart,
    PassPosition,
    TracedPass,
    Work,
    Workspace,
)


class _AllocationTracer(TorchDispatchMode):
    """A mode that records the allocations, the frees and the work of a pass."""

    def __init__(self, device: str, kernel: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.position = PassPosition(PassPart.BEFORE)
        self.pass_number = 0
        self.counts_work = False
        self.events: dict[PassPosition, list[MemoryEvent]] = {}
        self.work: dict[PassPosition, list[Work]] = {}
        self._allocs: dict[tuple[int, PassPosition], list[Alloc]] = {}  # key: pass and position
        self._is_cuda, self._attention_kernel = device == "cuda", kernel
        # By address of the StorageImpl: number of the pass, position, ordinal of the allocation. An
        # address is reused after a free, so the entry is removed when its storage is freed. Weak
        # references are to the storage, which views and detached tensors share.
        self._live: dict[int, tuple[int, PassPosition, int]] = {}
        self._storage_refs: dict[int, weakref.ref[Any]] = {}
        self._ignored: set[int] = set()
        self._any_results: set[int] = set()  # storages of results of `any`
        self._routing = AssumedRouting(is_cuda=self._is_cuda)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch enters and leaves the mode for each operator

    def begin_pass(self) -> None:
        self.pass_number += 1
        self.events, self.work = {}, {}
        self.move_to(PassPosition(PassPart.BEFORE))

    def move_to(self, position: PassPosition) -> None:
        self.position = position
        self.events.setdefault(position, [])

    def ignore(self, tensor: Tensor) -> None:
        """Record no events of a tensor that exists before the passes, such as a parameter."""
        self._ignored.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # `Tensor.item` runs this operator
            return self._assumed_value(args[0])
        if func is DEQUANTIZE:
            self._dequantize(*args)
            return None
        if (function := PRODUCT_OPERATORS.get(func)) is not None:
            with self:  # torch disables the mode in this method, but the function must be traced
                return function(*args)
        result = self._routing.result_of(func, args, kwargs or {})
        if self.counts_work and (work := work_of(func, args, kwargs, result)) is not None:
            self.work.setdefault(self.position, []).append(work)
        if isinstance(result, Tensor):
            if func is torch.ops.aten.any.default:
                self._any_results.add(result.untyped_storage()._cdata)
            self._record(result, func, args)
        elif result is not None:
            for each in result if isinstance(result, tuple | list) else tree_leaves(result):
                if isinstance(each, Tensor):
                    self._record(each, func, args)
        if self._is_cuda and (nbytes := cuda_workspace(func, args, self._attention_kernel)):
            self.events[self.position].append(Workspace(nbytes, str(func)))
        return result

    def _dequantize(self, target: Tensor, rows: Tensor, blocks: int, count: int, fmt: str) -> None:
        """Trace a dequantization in `count` equal parts, each of which frees its memory.

        Only the first part is run. Its work counts `count` times.
        """
        work = self.work.setdefault(self.position, [])
        num_works = len(work)
        with self:
            dequantize_parts(
                target.chunk(count)[0], rows.chunk(count)[0], blocks, parts=1, quant=fmt
            )
        part_work = [each._replace(name=UNPACKING + fmt) for each in work[num_works:]]
        work[num_works:] = count * part_work

    def _assumed_value(self, tensor: Tensor) -> bool | int:
        """Return the value that a module reads: `all` true, `any` false, an expert's index 0.

        Libraries read such values to check whether a mask is empty, or a number is finite.
        """
        if tensor.dtype != torch.bool:
            return self._routing.expert_index(tensor)
        return tensor.untyped_storage()._cdata not in self._any_results

    def _record(self, tensor: Tensor, func: Any, args: Sequence[Any]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._ignored or not storage.nbytes():
            return
        if self._is_cuda and tensor.device.type == "cpu":
            return  # the tensor is in host memory in a run, too, such as the seed of a dropout mask
        allocs = self._allocs.setdefault((self.pass_number, self.position), [])
        dtype = dtype_name(tensor.dtype)
        shape = ",".join(map(str, tensor.shape))  # no spaces, at which lines would wrap
        description = f"{func._schema.name.removeprefix('aten::')} {dtype} [{shape}]"
        nbytes = storage.nbytes() if self._is_cuda else cpu_nbytes(func, args, tensor)
        alloc = Alloc(len(allocs), nbytes, description)
        allocs.append(alloc)
        self.events[self.position].append(alloc)
        self._live[key] = (self.pass_number, self.position, alloc.ordinal)
        self._storage_refs[key] = weakref.ref(storage, partial(self._on_free, key))

    def _on_free(self, key: int, _: object) -> None:
        del self._storage_refs[key]
        self._any_results.discard(key)  # another tensor may get the address
        pass_number, position, ordinal = self._live.pop(key)
        is_previous = pass_number != self.pass_number
        self.events[self.position].append(Free(position, ordinal, is_previous=is_previous))

    def mark_gradient(self, name: str, gradient: Tensor) -> None:
        """Record that a tensor is the gradient of a parameter from now on."""
        key = gradient.untyped_storage()._cdata
        if key in self._live:
            _, position, ordinal = self._live[key]
            self.events[self.position].append(BecomesGradient(position, ordinal, name))

    def forget(self, gradient: Tensor) -> None:
        """Record no free of a gradient: the engine frees gradients."""
        key = gradient.untyped_storage()._cdata
        if key in self._live:
            del self._storage_refs[key], self._live[key]

    def last_pass(self) -> TracedPass:
        """Return the last pass.

        Tensors that outlive a pass are freed in the next pass. So the frees of the previous pass's
        tensors are recorded as frees of the equal tensors of this pass, which outlive it.
        """
        cached: list[CachedTensor] = []
        # The ordinals of tensors that outlive this pass, by position and description.
        outliving: dict[tuple[PassPosition, str], list[int]] = {}
        for pass_number, position, ordinal in sorted(self._live.values()):
            alloc = self._allocs[pass_number, position][ordinal]
            if pass_number == self.pass_number:
                outliving.setdefault((position, alloc.description), []).append(ordinal)
            else:
                cached.append(CachedTensor(position, alloc.nbytes, alloc.description))

        def renumbered(each: MemoryEvent) -> list[MemoryEvent]:
            if not (isinstance(each, Free) and each.is_previous):
                return [each]
            alloc = self._allocs[self.pass_number - 1, each.position][each.ordinal]
            # There is no equal tensor if only every second pass allocates it.
            equal = outliving.get((each.position, alloc.description))
            return [each._replace(ordinal=equal.pop(0))] if equal else []

        events = {
            position: [each for event in of_part for each in renumbered(event)]
            for position, of_part in self.events.items()
        }
        return TracedPass(events, tuple(cached), self.work)


class _PositionHooks:
    """The hooks that set the tracer's position in the pass."""

    def __init__(self, tracer: _AllocationTracer, module: nn.Module, units: Sequence[str]) -> None:
        self._tracer = tracer
        self._params = dict(module.named_parameters())
        self._seen: set[PassPosition] = set()
        unit_hooks = (self._hook(name, module.get_submodule(name)) for name in units)
        self._handles = [*chain(*unit_hooks)]
        self._handles += [
            module.register_forward_pre_hook(lambda *_: self._enter(PassPosition(PassPart.START))),
            module.register_forward_hook(lambda *_: self._enter(PassPosition(PassPart.LOSS))),
        ]
        for name, param in self._params.items():
            if param.requires_grad:
                hook = partial(self._on_gradient, name)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_pass(self) -> None:
        self._seen.clear()
        self._tracer.begin_pass()

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        def pre_hook(module: nn.Module, args: Any) -> None:
            self._enter(PassPosition(PassPart.FORWARD, name))

        def post_hook(module: nn.Module, args: Any, outputs: Any) -> None:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda gradient: self._begin_backward(name))
            self._enter(PassPosition(PassPart.BETWEEN, name))

        return [module.register_forward_pre_hook(pre_hook), module.register_forward_hook(post_hook)]

    def _enter(self, position: PassPosition) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation in backward, which belongs to the backward of its unit
        if position in self._seen:
            problem = "runs more than once in a forward: its memory cannot be estimated"
            raise UsageError(f"{position.unit or 'the module'} {problem}")
        self._seen.add(position)
        self._tracer.move_to(position)

    def _begin_backward(self, name: str) -> None:
        position = PassPosition(PassPart.BACKWARD, name)
        if position in self._seen:
            return
        if not any(each.part is PassPart.BACKWARD for each in self._seen):
            # Autograd accepts callbacks only while a backward runs, and calls them at its end.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._seen.add(position)
        self._tracer.move_to(position)

    def end_pass(self) -> None:
        """End the pass if no unit had a backward."""
        if self._tracer.position.part is not PassPart.END:
            self._end()

    def _on_gradient(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        self._tracer.mark_gradient(name, param.grad)

    def _end(self) -> None:
        self._tracer.move_to(PassPosition(PassPart.END))
        for param in self._params.values():
            if param.grad is not None:
                self._tracer.forget(param.grad)
                param.grad = None


@contextmanager
def _without_dynamo() -> Iterator[None]:
    """Keep torch's meta kernels from importing torch._dynamo, which takes most of a second.

    The kernels only call `torch._dynamo.disable`, which has no effect unless torch.compile runs. So
    a module with this function replaces torch._dynamo meanwhile.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    disabled: list[Any] = []

    def disable(function: Any, recursive: bool = True, *, wrapping: bool = True) -> Any:
        disabled.append(function)
        return function

    substitute = ModuleType("torch._dynamo")
    config = SimpleNamespace(error_on_nested_fx_trace=False, patch=lambda **_: nullcontext())
    substitute.__dict__.update(disable=disable, config=config)
    sys.modules["torch._dynamo"] = substitute
    torch.__dict__["_dynamo"] = substitute
    try:
        yield
    finally:
        del sys.modules["torch._dynamo"], torch.__dict__["_dynamo"]
        for function in disabled:
            function.__dict__.pop("__dynamo_disable", None)


def trace(
    module: nn.Module, units: Sequence[str], run: Callable[[], Any], device: str, kernel: str | None
) -> TracedPass:
    """Trace the second pass through a module, cut at `units`, with the operators of `device`.

    The first pass also allocates what is cached for all passes, such as rotary embeddings.
    `module` is on the meta device, with parameters in the compute dtype. `run` runs a forward and
    its backward. The result of `run` lives until the next call of `run` has returned.
    """
    tracer = _AllocationTracer(device, kernel)
    for tensor in (*module.parameters(), *module.buffers()):
        tracer.ignore(tensor)
    hooks = _PositionHooks(tracer, module, units)
    try:
        operators = operators_of(device, kernel)
        with without_gc(), _without_dynamo(), operators, torch.device("meta"), tracer:
            result = None
            for counts_work in (False, True):
                tracer.counts_work = counts_work  # only the second pass is returned
                hooks.begin_pass()
                result = run()
                hooks.end_pass()
        traced = tracer.last_pass()
        del result
    finally:
        hooks.remove()
    return traced
