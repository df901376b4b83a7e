"""The operators that a device would run, their results, and the workspaces of their kernels.

Meta tensors have no device, so if torch selects an operator by device, it is selected here. torch
computes the shape of a result in Python, and a model has the same operators again and again: in
every block, in every chunk of the loss, and in every micro-batch of a search's models. So each
result is computed once for each kind of arguments.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from fsdpctl.errors import UsageError
from fsdpctl.estimate.library_kernels import with_kernels
from fsdpctl.models.attention_kernels import assume_device
from fsdpctl.plan.attention_kernels import CUDNN, EFFICIENT, FLASH3, FLASH4, MATH
from fsdpctl.plan.layout import round_up

_aten = torch.ops.aten
_GROUPED_MM = _aten._grouped_mm.default
_SORTED_FROM, _ROWS_OF_A_THREAD = 3072, 10  # of the embedding's backward
_FLASH_BACKEND = 1  # of torch.nn.attention.SDPBackend, whose import is slow

_CUDNN_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward.default
_BACKWARDS_OF_ROWS = (_aten._scaled_dot_product_flash_attention_backward.default, _CUDNN_BACKWARD)

Attention = Callable[..., Tensor]


class _Options(NamedTuple):
    """The other arguments of attention, as torch names them."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _cuda_attention(plain: Attention, kernel: str | None) -> Attention:
    """Dispatch as torch does on CUDA with `kernel` preferred; None: flash attention.

    In float32, with a mask or with wide heads, torch uses the memory-efficient kernel. That does
    not support heads that share keys and values, for which torch computes plain products.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = _Options(*args, **kwargs)
        rest = (options.dropout_p, options.is_causal)
        in_two_bytes = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
        given: tuple[Any, ...] = (query, key, value)
        if kernel not in (EFFICIENT, MATH) and options.attn_mask is None and in_two_bytes:
            run = _aten._scaled_dot_product_flash_attention
            if kernel == CUDNN:
                run = _aten._scaled_dot_product_cudnn_attention
                given = (*given, None, query.requires_grad)
        elif kernel == MATH or query.shape[1] != key.shape[1]:
            return plain(query, key, value, *args, **kwargs)
        else:
            run = _aten._scaled_dot_product_efficient_attention
            bias = None if options.attn_mask is None else _additive_mask(options.attn_mask, query)
            given = (*given, bias, query.requires_grad)
        out: Tensor = run(*given, *rest, scale=options.scale)[0]
        return out

    return attention


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=like.dtype, device=like.device)
    never = torch.scalar_tensor(float("-inf"), dtype=like.dtype, device=like.device)
    return torch.where(mask, zero, never)


def _cpu_attention(plain: Attention, kernel: str | None) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = _Options(*args, **kwargs)
        if kernel == MATH or not _uses_flash_on_cpu(query, key, value, options):
            return plain(query, key, value, *args, **kwargs)
        bias = None if options.attn_mask is None else _additive_mask(options.attn_mask, query)
        rest = (options.dropout_p, options.is_causal)
        out: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, *rest, attn_mask=bias, scale=options.scale
        )[0]
        return out

    return attention


def _uses_flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> bool:
    with _disable_current_modes():
        given = (query, key, value, options.attn_mask)
        tensors: list[Any] = [each if each is None else _on_cpu(each) for each in given]
        rest: dict[str, Any] = options._asdict() | {"attn_mask": tensors.pop()}
        chosen = torch._fused_sdp_choice(*tensors, **rest)
    return int(chosen) == _FLASH_BACKEND


def _on_cpu(like: Tensor) -> Tensor:
    *others, last = like.shape
    row = torch.empty(last, dtype=like.dtype, device="cpu", requires_grad=like.requires_grad)
    return row.expand(*others, last)


class _FusedRMSNorm(torch.autograd.Function):
    """The tensors that the CUDA kernel saves: its input, and a float32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _cuda_rms_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rms_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is None or weight.dtype != x.dtype:
            return plain(x, shape, weight, eps)
        out: Tensor = _FusedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's
        return out

    return rms_norm


@contextmanager
def operators_of(device: str, kernel: str | None) -> Iterator[None]:
    """Run meta tensors as on `device` inside, with attention in `kernel`.

    Functions are replaced, because a mode would not be active while checkpointed parts are
    recomputed in backward.
    """
    attention, rms_norm = F.scaled_dot_product_attention, F.rms_norm
    try:
        if device == "cuda":
            F.scaled_dot_product_attention = _cuda_attention(attention, kernel)
            F.rms_norm = _cuda_rms_norm(rms_norm)
        else:
            F.scaled_dot_product_attention = _cpu_attention(attention, kernel)
        kernels = with_kernels() if device == "cuda" else nullcontext()
        with assume_device(device, kernel), kernels:
            yield
    finally:
        F.scaled_dot_product_attention = attention
        F.rms_norm = rms_norm


def result_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_cuda: bool
) -> object:
    """Return an operator's result on the meta device.

    torch's own meta function of `aten::_grouped_mm` accepts bfloat16 only. On CUDA, rows of its
    result begin on 16 bytes.
    """
    if func is not _GROUPED_MM:
        return cached_result(func, args, kwargs)
    left: Tensor = args[0]
    right: Tensor = args[1]
    rows: tuple[int, ...] = (left.shape[-2],)
    offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
    dtype = kwargs.get("out_dtype") or left.dtype
    columns = right.shape[-1]
    if left.ndim == right.ndim == 2:  # a product of each group, such as the weights' gradient
        rows = (len(offsets), left.shape[-2])
    if not is_cuda:
        return left.new_empty(*rows, columns, dtype=dtype)
    wide = left.new_empty(*rows, round_up(columns, 16 // dtype.itemsize), dtype=dtype)
    return wide[..., :columns]


def cuda_workspace(op: Any, inputs: Sequence[Any], kernel: str | None) -> int:
    """Return the bytes of a CUDA kernel's workspace, besides its results.

    Attention's backward has the sums of the softmax, the query's gradient in float32, and if heads
    share keys and values, their gradients: per query head in FlashAttention 2, in float32 in later
    versions. cuDNN reports its workspace only when it plans; that of FlashAttention 3 is assumed.
    The embedding's backward for more than a few tokens (EmbeddingBackwardKernel.cu) has buffers to
    sort them, and partial sums.
    """
    if op in _BACKWARDS_OF_ROWS or op.name() == "torch_attn::_varlen_attn_backward":
        return _flash_workspace(op, inputs, kernel)
    if op is _aten._scaled_dot_product_efficient_attention_backward.default:
        query = inputs[1]  # a product that is summed by rows, or its float32 gradient
        return int(4 * (query.numel() + query.numel() // query.shape[-1]))
    if op is _aten.embedding_dense_backward.default:
        tokens, rows, width = inputs[1].numel(), inputs[2], inputs[0].shape[-1]
        if tokens <= _SORTED_FROM:
            return 0
        partial_sums = tokens // _ROWS_OF_A_THREAD + min(tokens, rows)
        return int(4 * 8 * tokens + 4 * partial_sums * round_up(width, 32))
    return 0


def _flash_workspace(op: Any, inputs: Sequence[Any], kernel: str | None) -> int:
    """Return the bytes for rows of all heads, and for keys and values that heads share."""
    query, key = inputs[1], inputs[2]
    if op in _BACKWARDS_OF_ROWS:
        batch, heads, length, width = query.shape
        shared, rows = batch * key.shape[2], batch * heads * round_up(length, 128)
    else:  # packed documents
        total, heads, width = query.shape
        shared, rows = len(key), heads * (total + 128 * (len(inputs[6]) - 1))
    is_later = kernel in (FLASH3, FLASH4) or op is _CUDNN_BACKWARD
    shared *= 4 * key.shape[1] if is_later else query.itemsize * heads
    shared *= key.shape[1] != heads
    columns = round_up(width, 32 if width <= 128 else 64)
    return int(rows * 4 * (1 + columns) + 2 * shared * width)


def cpu_nbytes(op: Any, inputs: Sequence[Any], made: Tensor) -> int:
    """Return the bytes of a result on the CPU; statistics of a norm have its input's dtype."""
    nbytes: int = made.untyped_storage().nbytes()
    if op is _aten.native_layer_norm.default and made.dtype != inputs[0].dtype:
        nbytes = nbytes * int(inputs[0].dtype.itemsize) // made.dtype.itemsize
    return nbytes


_META = torch.device("meta")
_empty = torch.ops.aten.empty_strided.default
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_MAX_RESULTS = 20_000  # results that are kept

_NewTensor = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_results: dict[object, tuple[_NewTensor, ...] | None] = {}  # None: cannot be made from this


class _NotCacheable(Exception):  # noqa: N818  # an answer
    """An argument of another kind."""


def cached_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Return an operator's result: new tensors as the operator makes them."""
    if not _is_functional(func):
        return func(*args, **kwargs)
    try:
        key = (func, _key(args), _key(tuple(kwargs.items())))
        made = _results.get(key, ())
    except (_NotCacheable, TypeError):  # or one that cannot be a key
        return func(*args, **kwargs)
    if not made:
        result = func(*args, **kwargs)
        if made is not None and len(_results) < _MAX_RESULTS:
            _results[key] = _new_tensors(result, args)
        return result
    new = [_empty(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in made]
    return new[0] if len(new) == 1 else tuple(new)


@functools.cache
def _is_functional(func: Any) -> bool:
    schema = func._schema
    about = [*schema.returns, *schema.arguments]
    returns_tensors = all(str(each.type) == "Tensor" for each in schema.returns)
    return returns_tensors and bool(schema.returns) and all(e.alias_info is None for e in about)


def _key(values: Sequence[Any]) -> tuple[object, ...]:
    found: list[object] = []
    for each in values:
        if isinstance(each, Tensor):
            if type(each) not in _PLAIN_TENSORS or each.device != _META:
                raise _NotCacheable
            found.append((each.shape, each.stride(), each.dtype))  # wherever it begins
        elif isinstance(each, list | tuple):
            found.append(_key(each))
        else:
            found.append((type(each), each))
    return tuple(found)


def _new_tensors(result: object, args: Sequence[Any]) -> tuple[_NewTensor, ...] | None:
    """Return how to make the result, if all its tensors are new and have no more memory."""
    made = result if isinstance(result, tuple) else (result,)
    seen: set[int] = set()
    for each in made:
        if type(each) is not Tensor or each.device != _META or each.storage_offset():
            return None
        seen.add(each.untyped_storage()._cdata)
        needed = _empty(each.shape, each.stride(), dtype=each.dtype, device=_META)
        if each.untyped_storage().nbytes() != needed.untyped_storage().nbytes():
            return None
    given = {e.untyped_storage()._cdata for e in args if isinstance(e, Tensor)}
    if len(seen) < len(made) or seen & given or (isinstance(result, tuple) and len(made) == 1):
        return None
    return tuple((tuple(each.shape), each.stride(), each.dtype) for each in made)


_READS_VALUES = (
    "the module reads the value of a tensor, which is unknown before it runs: memory that depends "
    "on it cannot be estimated"
)


class AssumedRouting:
    """The last choice of experts, and what is computed from it.

    Meta tensors have no values, so every expert is assumed to get the same number of tokens.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        """Assume operators as on CUDA, or as on the CPU."""
        self._is_cuda = is_cuda
        self._num_choices, self._num_experts = 0, 1  # of the choices of all tokens; of the experts
        self._index_storages: set[int] = set()  # storages of results of `nonzero`

    def result_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        if func is _aten.nonzero.default:
            return self._nonzero(args[0])
        if func is _aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return self._to_cpu(args[0])
        result = result_of(func, args, kwargs, is_cuda=self._is_cuda)
        if func is _aten.topk.default:
            self._num_choices, self._num_experts = result[1].numel(), args[0].shape[-1]  # type: ignore[index]
        return result

    def expert_index(self, tensor: Tensor) -> int:
        """Return the place that `nonzero` found: the first one.

        UsageError if the tensor is another number.
        """
        if tensor.untyped_storage()._cdata in self._index_storages:
            return 0
        raise UsageError(_READS_VALUES)

    def _nonzero(self, mask: Tensor) -> Tensor:
        """Return places of what a mask selects: of all choices those of an expert, else all."""
        count = mask.numel()
        if count == self._num_choices:
            count = -(-count // self._num_experts)
        found = torch.empty(count, mask.ndim, dtype=torch.int64, device="meta")
        self._index_storages.add(found.untyped_storage()._cdata)
        return found

    def _to_cpu(self, tensor: Tensor) -> Tensor:
        """Return assumed numbers of tokens on the CPU, or zeros for a gradient.

        UsageError if the tensor is neither.
        """
        if tensor.is_floating_point():
            return torch.zeros_like(tensor, device="cpu")
        if tensor.shape != (self._num_experts,):
            raise UsageError(_READS_VALUES)
        first = (
            torch.arange(self._num_experts, device="cpu") < self._num_choices % self._num_experts
        )
        return (self._num_choices // self._num_experts + first).to(tensor.dtype)
