"""Removes blocks of a module that are like their neighbors: few represent all."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from torch import nn

from fsdpctl.predict.compute import TRACED_OF_A_ROW, Row

_PLAIN = (bool, int, float, str, type(None))
_NUMBERS_A_LAYER = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})


def shorten(module: nn.Module, units: Sequence[str]) -> list[Row]:
    """Shorten rows of like blocks in `module`, and return which blocks represent which.

    Args:
        module: on the meta device; it is modified.
        units: names of the blocks, in forward order.
    """
    rows: list[Row] = []
    for parent, names in groupby(units, key=lambda name: name.rpartition(".")[0]):
        siblings = module.get_submodule(parent)
        members = [name.rpartition(".")[2] for name in names]
        if isinstance(siblings, nn.ModuleList) and members == list(siblings._modules):
            rows += _shorten_list(parent, siblings)
    return rows


def _shorten_list(parent: str, siblings: nn.ModuleList) -> list[Row]:
    blocks = list(siblings)
    rows: list[Row] = []
    kept: list[nn.Module] = []
    number = 0
    for _, alike in groupby(blocks, key=_looks):
        row = list(alike)
        count = min(len(row), TRACED_OF_A_ROW)
        whole = tuple(f"{parent}.{number + index}" for index in range(len(row)))
        traced = tuple(f"{parent}.{len(kept) + index}" for index in range(count))
        rows.append(Row(traced, whole))
        kept += row[:count]
        number += len(row)
    del siblings[:]
    siblings.extend(kept)
    return rows


def _looks(block: nn.Module) -> object:
    """Return what determines the allocations of a block, which shares no parameters."""
    return [
        (
            name,
            type(each),
            [
                (key, tuple(param.shape), param.dtype, param.requires_grad)
                for key, param in each._parameters.items()
                if param is not None
            ],
            _plain_attributes(each.__dict__),
        )
        for name, each in block.named_modules()
    ]


def _plain_attributes(attributes: Mapping[str, object]) -> list[tuple[str, object]]:
    return [
        (key, value)
        for key, value in attributes.items()
        if isinstance(value, _PLAIN) and key not in _NUMBERS_A_LAYER
    ]
