"""The operators that a device would run, their results, and the workspaces of their kernels.

Tensors are on the meta device, so this module selects the operators that torch selects by device.
torch computes the shapes of results in Python. A model repeats its operators in every block, in
every chunk of the loss, and for every micro-batch size that a search tries. So the shapes of an
operator's results are computed once for each combination of arguments.
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
# Backward of an embedding: the most indices that it does not sort; gradient rows per thread.
_MOST_UNSORTED, _ROWS_PER_THREAD = 3072, 10
_FLASH_BACKEND = 1  # SDPBackend.FLASH_ATTENTION; importing torch.nn.attention is slow

_CUDNN_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward.default
_SDPA_BACKWARDS = (_aten._scaled_dot_product_flash_attention_backward.default, _CUDNN_BACKWARD)

Attention = Callable[..., Tensor]


class _Options(NamedTuple):
    """The optional arguments of `scaled_dot_product_attention`."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _cuda_attention(default: Attention, kernel: str | None) -> Attention:
    """Return attention as torch dispatches it on CUDA if `kernel` is preferred; None: flash.

    In float32, with a mask or with wide heads, torch uses the memory-efficient kernel. That kernel
    does not support grouped-query attention, for which torch falls back to the math kernel.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = _Options(*args, **kwargs)
        flags = (options.dropout_p, options.is_causal)
        flash_supports = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
        inputs: tuple[Any, ...] = (query, key, value)
        if kernel not in (EFFICIENT, MATH) and options.attn_mask is None and flash_supports:
            run = _aten._scaled_dot_product_flash_attention
            if kernel == CUDNN:
                run = _aten._scaled_dot_product_cudnn_attention
                inputs = (*inputs, None, query.requires_grad)
        elif kernel == MATH or query.shape[1] != key.shape[1]:
            return default(query, key, value, *args, **kwargs)
        else:
            run = _aten._scaled_dot_product_efficient_attention
            bias = None if options.attn_mask is None else _additive_mask(options.attn_mask, query)
            inputs = (*inputs, bias, query.requires_grad)
        out: Tensor = run(*inputs, *flags, scale=options.scale)[0]
        return out

    return attention


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=like.dtype, device=like.device)
    masked = torch.scalar_tensor(float("-inf"), dtype=like.dtype, device=like.device)
    return torch.where(mask, zero, masked)


def _cpu_attention(default: Attention, kernel: str | None) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = _Options(*args, **kwargs)
        if kernel == MATH or not _uses_flash_on_cpu(query, key, value, options):
            return default(query, key, value, *args, **kwargs)
        bias = None if options.attn_mask is None else _additive_mask(options.attn_mask, query)
        flags = (options.dropout_p, options.is_causal)
        out: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, *flags, attn_mask=bias, scale=options.scale
        )[0]
        return out

    return attention


def _uses_flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> bool:
    with _disable_current_modes():
        inputs = (query, key, value, options.attn_mask)
        tensors: list[Any] = [each if each is None else _on_cpu(each) for each in inputs]
        keywords: dict[str, Any] = options._asdict() | {"attn_mask": tensors.pop()}
        return int(torch._fused_sdp_choice(*tensors, **keywords)) == _FLASH_BACKEND


def _on_cpu(like: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape and dtype, with the memory of one row."""
    *others, last = like.shape
    row = torch.empty(last, dtype=like.dtype, device="cpu", requires_grad=like.requires_grad)
    return row.expand(*others, last)


class _FusedRMSNorm(torch.autograd.Function):
    """An RMSNorm that saves the tensors of the CUDA kernel: its input, and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _cuda_rms_norm(default: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rms_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is None or weight.dtype != x.dtype:
            return default(x, shape, weight, eps)
        out: Tensor = _FusedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    return rms_norm


@contextmanager
def operators_of(device: str, kernel: str | None) -> Iterator[None]:
    """Run operators on meta tensors as on `device`, with attention in `kernel`.

    Functions are replaced, because a TorchFunctionMode would not be active while checkpointed parts
    are recomputed in backward. They are replaced in all threads: trace in one thread at a time.
    """
    attention, rms_norm, is_cuda = F.scaled_dot_product_attention, F.rms_norm, device == "cuda"
    try:
        replacement = _cuda_attention if is_cuda else _cpu_attention
        F.scaled_dot_product_attention = replacement(attention, kernel)
        F.rms_norm = _cuda_rms_norm(rms_norm) if is_cuda else rms_norm
        with assume_device(device, kernel), with_kernels() if is_cuda else nullcontext():
            yield
    finally:
        F.scaled_dot_product_attention = attention
        F.rms_norm = rms_norm


def _meta_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, cuda: bool) -> Any:
    """Return an operator's result on the meta device.

    The meta function of `aten::_grouped_mm` in torch accepts bfloat16 only. On CUDA, each row of
    the result is aligned to 16 bytes.
    """
    if func is not _GROUPED_MM:
        return cached_result(func, args, kwargs)
    left, right, dtype = args[0], args[1], kwargs.get("out_dtype") or args[0].dtype
    rows, columns = [left.shape[-2]], right.shape[-1]
    if left.ndim == right.ndim == 2:  # one product per group, as in the gradient of the weights
        rows.insert(0, len(kwargs["offs"] if "offs" in kwargs else args[2]))
    if not cuda:
        return left.new_empty(*rows, columns, dtype=dtype)
    padded = left.new_empty(*rows, round_up(columns, 16 // dtype.itemsize), dtype=dtype)
    return padded[..., :columns]


def cuda_workspace(op: Any, inputs: Sequence[Any], kernel: str | None) -> int:
    """Return the bytes of a CUDA kernel's workspace, besides its results.

    The backward of attention allocates the sums of the softmax and the query's gradient in float32.
    With grouped-query attention, it allocates gradients of keys and values, too: per query head in
    FlashAttention 2, in float32 in later versions. The workspace of cuDNN is assumed to equal that
    of FlashAttention 3, because cuDNN reports it only when it plans. The backward of an embedding
    of many tokens (EmbeddingBackwardKernel.cu) allocates buffers to sort tokens, and partial sums.
    """
    if op in _SDPA_BACKWARDS or op.name() == "torch_attn::_varlen_attn_backward":
        return _flash_workspace(op, inputs, kernel)
    if op is _aten._scaled_dot_product_efficient_attention_backward.default:
        # Backward makes a float32 gradient of the query, and a float32 sum per row.
        query = inputs[1]
        return int(4 * (query.numel() + query.numel() // query.shape[-1]))
    if op is _aten.embedding_dense_backward.default:
        tokens, rows, embedding_dim = inputs[1].numel(), inputs[2], inputs[0].shape[-1]
        if tokens <= _MOST_UNSORTED:
            return 0
        partial_sums = tokens // _ROWS_PER_THREAD + min(tokens, rows)
        sort_buffers = 4 * 8 * tokens  # four buffers of int64 indices
        return int(sort_buffers + 4 * partial_sums * round_up(embedding_dim, 32))
    return 0


def _flash_workspace(op: Any, inputs: Sequence[Any], kernel: str | None) -> int:
    """Return the bytes for rows of all heads, and for keys and values of grouped heads."""
    query, key = inputs[1], inputs[2]
    if op in _SDPA_BACKWARDS:
        batch, heads, length, head_dim = query.shape
        kv_rows, rows = batch * key.shape[2], batch * heads * round_up(length, 128)
    else:  # packed documents
        total, heads, head_dim = query.shape
        kv_rows, rows = len(key), heads * (total + 128 * (len(inputs[6]) - 1))
    is_later = kernel in (FLASH3, FLASH4) or op is _CUDNN_BACKWARD
    kv_bytes = kv_rows * head_dim * (4 * key.shape[1] if is_later else query.itemsize * heads)
    if key.shape[1] == heads:
        kv_bytes = 0
    columns = round_up(head_dim, 32 if head_dim <= 128 else 64)
    return int(rows * 4 * (1 + columns) + 2 * kv_bytes)


def cpu_nbytes(op: Any, inputs: Sequence[Any], result: Tensor) -> int:
    """Return the bytes of a result on the CPU: statistics of a norm have the input's dtype."""
    nbytes: int = result.untyped_storage().nbytes()
    if op is _aten.native_layer_norm.default and result.dtype != inputs[0].dtype:
        nbytes = nbytes * int(inputs[0].dtype.itemsize) // result.dtype.itemsize
    return nbytes


_META = torch.device("meta")
_empty = torch.ops.aten.empty_strided.default
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_MAX_RESULTS = 20_000  # in the cache

_NewTensor = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
# Results by operator and arguments. None: the result cannot be made from shapes and strides.
_results: dict[object, tuple[_NewTensor, ...] | None] = {}


class _NotCacheable(Exception):  # noqa: N818  # an answer, not an error
    """An argument is a tensor with data, or of a subclass of Tensor."""


def cached_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Return an operator's result; for known arguments, from cached shapes."""
    if not _is_functional(func):
        return func(*args, **kwargs)
    try:
        key = (func, _key(args), _key(tuple(kwargs.items())))
        tensors = _results.get(key, ())
    except (_NotCacheable, TypeError):  # TypeError: an argument cannot be hashed
        return func(*args, **kwargs)
    if not tensors:
        result = func(*args, **kwargs)
        if tensors is not None and len(_results) < _MAX_RESULTS:
            _results[key] = _new_tensors(result, args)
        return result
    new = [_empty(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in tensors]
    return new[0] if len(new) == 1 else tuple(new)


@functools.cache
def _is_functional(func: Any) -> bool:
    returns, arguments = func._schema.returns, func._schema.arguments
    returns_tensors = bool(returns) and all(str(each.type) == "Tensor" for each in returns)
    return returns_tensors and all(each.alias_info is None for each in (*returns, *arguments))


def _key(values: Sequence[Any]) -> tuple[object, ...]:
    key: list[object] = []
    for each in values:
        if isinstance(each, Tensor):
            if type(each) not in _PLAIN_TENSORS or each.device != _META:
                raise _NotCacheable
            key.append((each.shape, each.stride(), each.dtype))  # the tensor's offset has no effect
        elif isinstance(each, list | tuple):
            key.append(_key(each))
        else:
            key.append((type(each), each))
    return tuple(key)


def _new_tensors(result: object, args: Sequence[Any]) -> tuple[_NewTensor, ...] | None:
    """Describe the tensors of a result; None if a tensor is a view or has additional memory."""
    tensors = result if isinstance(result, tuple) else (result,)
    storages: set[int] = set()
    for each in tensors:
        if type(each) is not Tensor or each.device != _META or each.storage_offset():
            return None
        storages.add(each.untyped_storage()._cdata)
        needed = _empty(each.shape, each.stride(), dtype=each.dtype, device=_META)
        if each.untyped_storage().nbytes() != needed.untyped_storage().nbytes():
            return None
    inputs = {e.untyped_storage()._cdata for e in args if isinstance(e, Tensor)}
    if len(storages) < len(tensors) or storages & inputs:
        return None
    if isinstance(result, tuple) and len(tensors) == 1:  # `cached_result` would return a Tensor
        return None
    return tuple((tuple(each.shape), each.stride(), each.dtype) for each in tensors)


_READS_VALUES = (
    "the module reads the value of a tensor, which is unknown before it runs: memory that depends "
    "on it cannot be estimated"
)


class AssumedRouting:
    """The results that depend on the routing of tokens to experts.

    Meta tensors have no values, so all experts are assumed to receive equally many tokens.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        """Compute results of operators as on CUDA, or as on the CPU."""
        self._is_cuda = is_cuda
        self._num_choices, self._num_experts = 0, 1  # the last routing's
        self._index_storages: set[int] = set()  # storages of results of `nonzero`

    def result_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        if func is _aten.nonzero.default:
            return self._nonzero(args[0])
        if func is _aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return self._to_cpu(args[0])
        result = _meta_result(func, args, kwargs, cuda=self._is_cuda)
        if func is _aten.topk.default:
            self._num_choices, self._num_experts = result[1].numel(), args[0].shape[-1]
        return result

    def expert_index(self, tensor: Tensor) -> int:
        """Return 0, the first expert, for a result of `nonzero`; UsageError for other tensors."""
        if tensor.untyped_storage()._cdata in self._index_storages:
            return 0
        raise UsageError(_READS_VALUES)

    def _nonzero(self, mask: Tensor) -> Tensor:
        """Return the indices that a mask selects.

        A mask of all choices selects the choices of one expert; any other mask selects everything.
        """
        count = mask.numel()
        if count == self._num_choices:
            count = -(-count // self._num_experts)
        indices = torch.empty(count, mask.ndim, dtype=torch.int64, device="meta")
        self._index_storages.add(indices.untyped_storage()._cdata)
        return indices

    def _to_cpu(self, tensor: Tensor) -> Tensor:
        """Return the assumed tokens per expert, or zeros for floating-point numbers, on the CPU.

        UsageError if the tensor has other values.
        """
        if tensor.is_floating_point():
            return torch.zeros_like(tensor, device="cpu")
        if tensor.shape != (self._num_experts,):
            raise UsageError(_READS_VALUES)
        count, experts = self._num_choices, self._num_experts
        has_one_more = torch.arange(experts, device="cpu") < count % experts
        return (count // experts + has_one_more).to(tensor.dtype)
