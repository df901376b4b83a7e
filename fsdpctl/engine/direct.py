"""Linear layers that write the gradient of their weight where it is reduced from.

Autograd makes a tensor of each weight's gradient, and all of a unit's are copied together when its
backward is over. A matrix product can write into the flat buffer itself, scaled and in the buffer's
dtype: then neither the tensor nor the copy is needed, and nothing is rounded before it is added.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from fsdpctl.errors import EngineError

# Into a matrix: the product of two others times the last number, plus itself times the one before.
Accumulate = Callable[[Tensor, Tensor, Tensor, float, float], None]
# The gradient of a layer's output and its input, a row each; False: it was not taken.
Write = Callable[[Tensor, Tensor], bool]


def accumulation(computed: torch.dtype, reduced: torch.dtype, device: torch.device) -> Accumulate:
    """How products of matrices of one dtype are added to a matrix of another.

    Raises:
        EngineError: this version of torch cannot on `device`.
    """
    if computed == reduced:
        return _add_product
    row = torch.ones(1, 1, dtype=computed, device=device)
    try:
        _add_wider_product(row.to(reduced), row, row, 0.0, 1.0)
    except (RuntimeError, TypeError) as error:
        raise EngineError(
            f"DirectLinear: torch {torch.__version__} cannot add products of {computed} to "
            f"{reduced} on {device.type}: reduce in {computed}, or use plain linear layers"
        ) from error
    return _add_wider_product


def _add_product(out: Tensor, left: Tensor, right: Tensor, keep: float, scale: float) -> None:
    torch.addmm(out, left, right, beta=keep, alpha=scale, out=out)


def _add_wider_product(out: Tensor, left: Tensor, right: Tensor, keep: float, scale: float) -> None:
    torch.addmm(out, left, right, out_dtype=out.dtype, beta=keep, alpha=scale, out=out)


class _Saved(torch.autograd.Function):
    """Keeps what the product's backward needs.

    It is a node of its own so that it is saved before the product is computed: where a checkpoint
    computes a block again, it stops at the last tensor to be saved, and so before its last product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Product(torch.autograd.Function):
    """torch's linear layer; its weight has no gradient for autograd where `write` took it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, saved: Tensor, write: Write
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.saved = saved.grad_fn
        ctx.write = write
        made = F.linear(x, weight, bias)
        # What is a view when it leaves a function of our own cannot be written to in place.
        return torch.ops.aten._unsafe_view(made, made.shape) if made._is_view() else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        of_x = of_weight = of_bias = None
        if gradient is not None:
            x, weight = ctx.saved.saved_tensors
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[0]:
                of_x = (rows @ weight).reshape(x.shape)
            if ctx.needs_input_grad[1]:
                of_weight = _gradient_of_weight(ctx, rows, x.reshape(-1, x.shape[-1]))
            if ctx.needs_input_grad[2]:
                of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None


def _gradient_of_weight(node: Any, rows: Tensor, inputs: Tensor) -> Tensor | None:
    """None where it is not wanted, or was written."""
    if torch.is_grad_enabled():
        return rows.t() @ inputs  # it will be differentiated itself
    accumulator, _ = node.next_functions[1]
    try:
        is_wanted = torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch.autograd.grad was asked for it
        return rows.t() @ inputs
    return rows.t() @ inputs if is_wanted and not node.write(rows, inputs) else None


class DirectLinear(nn.Linear):
    """torch's linear layer, whose weight's gradient need not be a tensor of its own.

    In a block of a sharded model its backward writes into the buffer that is reduced, if the weight
    belongs to no other module. Elsewhere, under autocast, torch.compile, functional transforms and
    forward-mode differentiation, and where the weight has hooks of `register_hook` or
    `register_post_accumulate_grad_hook`, it does what `nn.Linear` does.
    """

    _attached: Mapping[int, tuple[Tensor, Write, int]] = {}  # one or none

    def attach(self, write: Write, num_hooks: int) -> RemovableHandle:
        """Have `write` called with what the weight's gradient is the product of.

        Args:
            write: takes the gradient of the output and the input, a row each.
            num_hooks: how many the engine has on the weight; if there are more, they shall see a
                gradient.
        """
        attached: OrderedDict[int, tuple[Tensor, Write, int]] = OrderedDict()
        handle = RemovableHandle(attached)
        attached[handle.id] = self.weight, write, num_hooks
        self._attached = attached
        return handle

    def __getstate__(self) -> dict[str, Any]:
        """A copy is a layer of its own, which nobody has attached anything to."""
        return {name: value for name, value in self.__dict__.items() if name != "_attached"}

    def forward(self, input: Tensor) -> Tensor:
        """As in torch."""
        for weight, write, num_hooks in self._attached.values():
            if self._is_usual(input, weight):
                return self._product(input, weight, write, num_hooks)
        return super().forward(input)

    def _product(self, x: Tensor, weight: Tensor, write: Write, num_hooks: int) -> Tensor:
        def write_unhooked(rows: Tensor, inputs: Tensor) -> bool:
            if not weight.requires_grad:
                return True  # nobody wants it any more
            return count_hooks(weight) == num_hooks and write(rows, inputs)

        saved = _Saved.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's
        made: Tensor = _Product.apply(x, weight, self.bias, saved, write_unhooked)  # type: ignore[no-untyped-call]  # torch's
        return made

    def _is_usual(self, x: Tensor, weight: Tensor) -> bool:
        """Whether nothing is between the layer and autograd that wants to see what happens."""
        return (
            self._parameters.get("weight") is weight
            and type(x) is Tensor
            and x.dtype == weight.dtype
            and weight.requires_grad
            and torch.autograd.forward_ad._current_level < 0
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
        )


def count_hooks(weight: Tensor) -> int:
    """How many want to see its gradient."""
    after = weight._post_accumulate_grad_hooks
    return len(weight._backward_hooks or ()) + len(after or ())


def use_direct_linears(module: nn.Module) -> nn.Module:
    """Make every plain `nn.Linear` in `module` a `DirectLinear`, in place; returns `module`.

    Subclasses, and layers whose forward was replaced, stay what they are. To be called before
    `shard_model`.
    """
    for each in module.modules():
        if type(each) is nn.Linear and "forward" not in each.__dict__:
            each.__class__ = DirectLinear
    return module
