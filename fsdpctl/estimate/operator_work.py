"""The work of operators that are traced on the meta device: FLOPs and bytes."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fsdpctl.models.context_parallel import ALL_TO_ALL
from fsdpctl.predict.hardware import INDEXED_GROUPED_MM
from fsdpctl.predict.model_pass import Work, WorkKind

_aten = torch.ops.aten
# The index of the first factor among the arguments.
_MATMULS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1,
            _aten.baddbmm.default: 1}  # fmt: skip
# Products with a weight. Tracing dispatches them only within operators that fsdpctl defines; other
# linear layers are traced as `mm` or `addmm`.
_LINEARS = {_aten.linear.default, _aten.matmul.default}
_GROUPED_MM = _aten._grouped_mm.default
# The index of the query, which precedes the key, and the index of `is_causal`.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default: (0, 4),
    _aten._scaled_dot_product_efficient_attention.default: (0, 6),
    _aten._scaled_dot_product_cudnn_attention.default: (0, 6),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 4),
    _aten._scaled_dot_product_flash_attention_backward.default: (1, 11),
    _aten._scaled_dot_product_efficient_attention_backward.default: (1, 11),
    _aten._scaled_dot_product_cudnn_attention_backward.default: (1, 14),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 7),
}
_Dims = tuple[int, int, int, int]
_INDEX_PUTS = {_aten.index_put.default, _aten.index_put_.default}
_NO_WORK = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.detach.default}
# (kind, number of (length, length) products, number of passes over queries and keys)
_FORWARD, _BACKWARD = (WorkKind.ATTENTION, 2, 2), (WorkKind.ATTENTION_BACKWARD, 5, 4)


def work_of(func: Any, args: Sequence[Any], kwargs: Any, result: object) -> Work | None:
    """Return the work of an operator; None if it computes nothing, as views and `empty`."""
    results = _tensors(result)
    if func in _NO_WORK or not results:
        return None
    if func is ALL_TO_ALL:
        return Work(_name(func), WorkKind.EXCHANGE, 0, _bytes_of(results[0]), results[0].itemsize)
    if func in _MATMULS or (func in _LINEARS and args[1].ndim == 2):
        nbytes = sum(map(_bytes_of, (*_tensors(args), *results)))
        rows = results[0] if func in _MATMULS else results[0].flatten(0, -2)
        batch = rows.shape[0] if rows.ndim == 3 else 1
        dims = (batch, *rows.shape[-2:], args[_MATMULS.get(func, 0)].shape[-1])
        return Work(_name(func), WorkKind.MATMUL, 2 * prod(dims), nbytes, rows.itemsize, dims)
    if func is _GROUPED_MM:
        return _grouped_mm(func, args, results[0])
    if func in _ATTENTION:
        return _sdpa(func, args)
    if func.name().startswith("torch_attn::_varlen_attn"):
        return _varlen_attention(func, args, is_backward=func.name().endswith("backward"))
    read = _tensors([*args, *(kwargs or {}).values()])
    sizes = {each.untyped_storage()._cdata: _bytes_of(each) for each in read}
    is_view = all(each.untyped_storage()._cdata in sizes for each in results)
    if is_view and not func._schema.is_mutable:
        return None
    nbytes = sum(map(_bytes_of, results)) + sum(sizes.values())
    if func is _aten.embedding.default:  # reads only the rows of these tokens
        nbytes = 2 * _bytes_of(results[0])
    elif func is _aten.embedding_dense_backward.default:
        nbytes = 2 * max(map(_bytes_of, (results[0], args[0])))
    elif not read:
        nbytes = 2 * nbytes  # also the fill kernel, which is a separate operator
    dims = (0, 0, 0, _serialized_rows(args)) if func in _INDEX_PUTS else (0, 0, 0, 0)
    return Work(_name(func), WorkKind.MEMORY, 0, nbytes, results[0].itemsize, dims)


def _serialized_rows(args: Sequence[Any]) -> int:
    """Return how many rows are added to each row of the target, one after another.

    0 if the operator does not accumulate rows.
    """
    target, values, *accumulate = args[0], args[2], *args[3:4]
    are_rows = values.ndim == target.ndim == 2 and values.shape[1] > 1
    return -(-len(values) // len(target)) if are_rows and any(accumulate) else 0


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, list | tuple):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _grouped_mm(func: Any, args: Sequence[Any], result: Tensor) -> Work:
    """Return the work of grouped products; `dims[1]` is the number of tokens per group.

    That holds for the gradient of the weights, too, which sums over tokens.
    """
    left, right = args[0], args[1]
    if left.ndim == right.ndim == 2:  # the gradient of the weights
        groups, inner, columns = result.shape
        tokens = left.shape[1]
    else:
        groups, inner, columns = right.shape[0], left.shape[-1], right.shape[-1]
        tokens = left.shape[0]
    flops, rows = 2 * tokens * inner * columns, -(-tokens // groups)
    nbytes, dims = sum(map(_bytes_of, (left, right, result))), (groups, rows, columns, inner)
    # A stride of 0 marks rows that a kernel reads by index (library_kernels).
    reads_by_index = 0 in (*left.stride(), *right.stride())
    name = INDEXED_GROUPED_MM if reads_by_index else _name(func)
    return Work(name, WorkKind.MATMUL, flops, nbytes, result.itemsize, dims)


def _sdpa(func: Any, args: Sequence[Any]) -> Work:
    first, causal = _ATTENTION[func]
    query, key = args[first : first + 2]
    is_causal = len(args) > causal and args[causal] is True
    flops = (1 if is_causal else 2) * query.numel() * key.shape[2]
    # The gradient is the first argument of a backward operator, so the query is not at index 0.
    return _attention(func, query, key, flops, query.shape, _BACKWARD if first else _FORWARD)


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    flops: int,
    dims: _Dims,
    amounts: tuple[WorkKind, int, int],
) -> Work:
    kind, products, passes = amounts
    nbytes = passes * (_bytes_of(query) + _bytes_of(key))
    return Work(_name(func), kind, products * flops, nbytes, query.itemsize, dims)


def _varlen_attention(func: Any, args: Sequence[Any], *, is_backward: bool) -> Work:
    indices = (1, 2, 6, 13) if is_backward else (0, 1, 3, 9)
    query, key, offsets, window = (args[index] for index in indices)
    total, heads, head_dim = query.shape
    count = max(1, len(offsets) - 1) if isinstance(offsets, Tensor) and offsets.ndim == 1 else 1
    length = -(-total // count)
    flops, dims = (2 * query.numel() * _attended(length, window), (count, heads, length, head_dim))
    return _attention(func, query, key, flops, dims, _BACKWARD if is_backward else _FORWARD)


def _attended(length: int, window: Sequence[int] | None) -> int:
    """Return the average number of tokens that a token attends to, by the mask or window."""
    most = min(window[0] + 1, length) if window and window[0] >= 0 else length
    # The first `most` tokens attend to half as many on average, because attention is causal.
    return max(1, round(most - most * most / (2 * length)))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")
