"""The work of operators that were traced on the meta device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpctl.models.context import ALL_TO_ALL
from fsdpctl.predict.compute import Work, WorkKind

_aten = torch.ops.aten
_MATMULS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1,
            _aten.baddbmm.default: 1}  # fmt: skip
# With one weight for all rows; seen only within operators of our own.
_PRODUCTS = {_aten.linear.default, _aten.matmul.default}
_GROUPED = _aten._grouped_mm.default
_FORWARDS = {
    _aten._scaled_dot_product_flash_attention.default: 4,
    _aten._scaled_dot_product_efficient_attention.default: 6,
    _aten._scaled_dot_product_cudnn_attention.default: 6,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
}  # with the position of each one's `is_causal`
_BACKWARDS = {
    _aten._scaled_dot_product_flash_attention_backward.default: 11,
    _aten._scaled_dot_product_efficient_attention_backward.default: 11,
    _aten._scaled_dot_product_cudnn_attention_backward.default: 14,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
}
_FREE = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.detach.default}
_OF_A_FORWARD, _OF_A_BACKWARD = 2, 5  # matrix products of length by length


def work_of(func: Any, args: Sequence[Any], kwargs: Any, result: object) -> Work | None:
    """Return an operator's work, or None if `result` is a view of an argument, or only memory."""
    made = _tensors(result)
    if func in _FREE or not made:
        return None
    if func is ALL_TO_ALL:
        return Work(_name(func), WorkKind.EXCHANGE, 0, _bytes_of(made[0]), made[0].itemsize)
    if func in _MATMULS:
        given = [each for each in args if isinstance(each, Tensor)]
        return _matmul(func, args[_MATMULS[func]], made[0], sum(map(_bytes_of, (*given, *made))))
    if func in _PRODUCTS and args[1].ndim == 2:
        given = [each for each in args if isinstance(each, Tensor)]
        nbytes = sum(map(_bytes_of, (*given, *made)))
        return _matmul(func, args[0], made[0].flatten(0, -2), nbytes)
    if func is _GROUPED:
        return _grouped(func, args, made[0])
    if func in _FORWARDS:
        query, key = args[0], args[1]
        is_causal = _is_causal(args, _FORWARDS[func])
        return _attention(func, query, key, is_causal, _OF_A_FORWARD)
    if func in _BACKWARDS:
        query, key = args[1], args[2]
        is_causal = _is_causal(args, _BACKWARDS[func])
        return _attention(func, query, key, is_causal, _OF_A_BACKWARD)
    if func.name().startswith("torch_attn::_varlen_attn"):
        return _documents(func, func.name().endswith("backward"), args)
    read = _tensors([*args, *(kwargs or {}).values()])
    if not func._schema.is_mutable and _is_window(made, read):
        return None
    nbytes = _distinct(read) + sum(map(_bytes_of, made))
    if func in (_aten.embedding.default, _aten.embedding_dense_backward.default):
        nbytes = 2 * max(map(_bytes_of, (made[0], args[0]) if len(args) > 2 else made))
        if func is _aten.embedding.default:
            nbytes = 2 * _bytes_of(made[0])
    elif not read:
        nbytes = 2 * nbytes  # memory that a kernel of another name fills
    return Work(_name(func), WorkKind.MEMORY, 0, nbytes, made[0].itemsize)


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, list | tuple):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _matmul(func: Any, left: Tensor, made: Tensor, nbytes: int) -> Work:
    batch = made.shape[0] if made.ndim == 3 else 1
    rows, columns = made.shape[-2:]
    length = left.shape[-1]
    flops = 2 * batch * rows * columns * length
    return Work(
        _name(func), WorkKind.MATMUL, flops, nbytes, made.itemsize, (batch, rows, columns, length)
    )


def _grouped(func: Any, args: Sequence[Any], made: Tensor) -> Work:
    """Return the work of the products of groups of rows, assumed to be of equal size."""
    left, right = args[0], args[1]
    if left.ndim == right.ndim == 2:  # the gradient of the weights
        groups, length = made.shape[0], -(-left.shape[1] // made.shape[0])
        rows, columns = made.shape[1:]
        flops = 2 * rows * columns * left.shape[1]
    else:
        groups, length, columns = right.shape[0], left.shape[-1], right.shape[-1]
        rows = -(-left.shape[0] // groups)
        flops = 2 * left.shape[0] * length * columns
    nbytes, dims = sum(map(_bytes_of, (left, right, made))), (groups, rows, columns, length)
    return Work(_name(func), WorkKind.MATMUL, flops, nbytes, made.itemsize, dims)


def _attention(func: Any, query: Tensor, key: Tensor, is_causal: bool, products: int) -> Work:
    batch, heads, length, width = query.shape
    flops = products * 2 * batch * heads * length * key.shape[2] * width
    is_forward = products == _OF_A_FORWARD
    kind = WorkKind.ATTENTION if is_forward else WorkKind.ATTENTION_BACKWARD
    passes = 2 if is_forward else 4
    nbytes = passes * (_bytes_of(query) + _bytes_of(key))
    dims = (batch, heads, length, width)
    return Work(_name(func), kind, flops // 2 if is_causal else flops, nbytes, query.itemsize, dims)


def _documents(func: Any, is_backward: bool, args: Sequence[Any]) -> Work:
    """Return the work on packed documents: as many as there are offsets, of equal length."""
    query, key, offsets, window = (
        (args[1], args[2], args[6], args[13])
        if is_backward
        else (args[0], args[1], args[3], args[9])
    )
    products = _OF_A_BACKWARD if is_backward else _OF_A_FORWARD
    total, heads, width = query.shape
    count = max(1, len(offsets) - 1) if isinstance(offsets, Tensor) and offsets.ndim == 1 else 1
    length = -(-total // count)
    flops = 2 * products * total * heads * _seen(length, window) * width
    kind = WorkKind.ATTENTION_BACKWARD if is_backward else WorkKind.ATTENTION
    nbytes = (4 if is_backward else 2) * (_bytes_of(query) + _bytes_of(key))
    return Work(_name(func), kind, flops, nbytes, query.itemsize, (count, heads, length, width))


def _seen(length: int, window: Sequence[int] | None) -> int:
    """Return the tokens that each one attends to on average: all before it, or a window."""
    most = window[0] + 1 if window and window[0] >= 0 else length
    most = min(most, length)
    return max(1, round(most - most * most / (2 * length)))


def _is_causal(args: Sequence[Any], index: int) -> bool:
    return len(args) > index and args[index] is True


def _is_window(made: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
    there = {each.untyped_storage()._cdata for each in read}
    return all(each.untyped_storage()._cdata in there for each in made)


def _distinct(tensors: Sequence[Tensor]) -> int:
    return sum({each.untyped_storage()._cdata: _bytes_of(each) for each in tensors}.values())


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")
