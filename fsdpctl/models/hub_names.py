"""The tensors in files of the Hub that store the weights of a model of transformers.

transformers merges weights when it loads them: the experts of a layer are one parameter in memory,
but two or three tensors for each expert in files. transformers' conversion tables list both.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.models.transformers_decoder import TransformersDecoder

Shape = tuple[int, ...]
# Operations and dimensions of conversions that only concatenate the elements of tensors.
_CONCATENATED = (("Concatenate", 0),)
_STACKED = (("MergeModulelist", 0),)
_STACKED_PAIRS = (("MergeModulelist", 0), ("Concatenate", 1))
_CONSTANTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # buffers in old files


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The stored tensors that, flattened and concatenated, make up a tensor of the model."""

    shape: Shape  # () also if the model has no such tensor
    is_buffer: bool
    parts: tuple[str, ...]
    copies: tuple[str, ...] = ()  # stored tensors that the model ties to `parts`


def map_stored_tensors(module: TransformersDecoder, names: Sequence[str]) -> dict[str, StoredParts]:
    """Return the parts of each tensor of the model by name, given the names of stored tensors.

    The result omits tensors without parts, and stored tensors that transformers ignores.
    UsageError if a conversion does more than concatenate tensors.
    """
    from transformers.core_model_loading import dot_natural_key

    tables = _Conversions(module)
    by_target: dict[str, dict[str, list[str]]] = {}  # key: name in memory, then pattern
    for name in sorted(names, key=dot_natural_key):
        target, pattern = tables.target(name)
        by_target.setdefault(target, {}).setdefault(pattern, []).append(name)
    result = {}
    for name, by_pattern in by_target.items():
        parts, copies = _order_parts(name, by_pattern, tables), list[str]()
        if set(by_pattern) == {""}:  # without a conversion, other tensors are copies of a tied one
            parts, copies = parts[:1], parts[1:]
        if name in tables.shapes or not tables.ignores(name):
            shape, is_buffer = tables.shapes.get(name, ()), name in tables.buffers
            result[name] = StoredParts(shape, is_buffer, tuple(parts), tuple(copies))
    return result


def stored_names(module: TransformersDecoder) -> dict[str, Shape]:
    """Return the shapes of the tensors that transformers writes to files, by name."""
    from transformers.core_model_loading import revert_weight_conversion

    model = module.transformers_model
    shapes = _Conversions(module).shapes
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        reverted = revert_weight_conversion(model, tensors)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"model: weights cannot be renamed: {error}") from None
    return {name: tuple(each.shape) for name, each in reverted.items()}


class _Conversions:
    """transformers' conversion tables for one model."""

    def __init__(self, module: TransformersDecoder) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model = model = module.transformers_model
        table = get_model_conversion_mapping(model)
        self._converters = [each for each in table if isinstance(each, WeightConverter)]
        self._renamings = [each for each in table if isinstance(each, WeightRenaming)]
        self.by_pattern = {name: each for each in self._converters for name in each.source_patterns}
        params = dict(module.named_parameters())
        extra = {name: each for name, each in module.state_dict().items() if name not in params}
        aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)} - {*params}
        self.buffers = {*extra} - aliases
        self.shapes: dict[str, Shape] = {
            **{name: tuple(each.shape) for name, each in params.items()},
            **{name: tuple(extra[name].shape) for name in self.buffers},
        }
        self._tied_names = tied_names(module)
        # rename_source_key takes a state dict; it tests only that values are not None.
        self._model_names = dict.fromkeys(module.state_dict(), True)

    def target(self, name: str) -> tuple[str, str]:
        """Return the name in memory of a stored tensor, and the pattern of its conversion."""
        from transformers.core_model_loading import rename_source_key

        prefix, names = self.model.base_model_prefix, self._model_names
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, names)
        if target not in names and name in names:  # the file already has the name in memory
            target, pattern = rename_source_key(name, [], [], prefix, names)
        return self._tied_names.get(target, target), pattern or ""

    def ignores(self, name: str) -> bool:
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return name.endswith(_CONSTANTS) or any(re.search(each, name) for each in patterns)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter by its other names."""
    first = {id(param): name for name, param in module.named_parameters()}
    params = module.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in params if first[id(param)] != name}


def _order_parts(name: str, by_pattern: Mapping[str, list[str]], tables: _Conversions) -> list[str]:
    if set(by_pattern) == {""}:
        return by_pattern[""]
    converter = tables.by_pattern[next(pattern for pattern in by_pattern if pattern)]
    steps = tuple((type(each).__name__, getattr(each, "dim", 0)) for each in converter.operations)
    lists = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
    if steps in (_STACKED, _STACKED_PAIRS):
        for names in lists:
            _check_numbers(name, names)
    if steps == _CONCATENATED or (steps == _STACKED and len(lists) == 1):
        return [each for names in lists for each in names]
    if steps == _STACKED_PAIRS and len({len(each) for each in lists}) == 1:
        return [each for matrices in zip(*lists, strict=True) for each in matrices]
    operations = " and ".join(operation for operation, _ in steps)
    raise UsageError(f"model: {name}: conversion of weights by {operations}: not supported")


def _check_numbers(name: str, stored: Sequence[str]) -> None:
    """Check that stored names differ in one number only, which counts from 0."""
    numbers = zip(*(map(int, re.findall(r"\d+", each)) for each in stored), strict=True)
    varying = [each for each in numbers if len({*each}) > 1]
    if len(stored) > 1 and varying != [(*range(len(stored)),)]:
        problem = f"{stored[0]} to {stored[-1]}: expected {len(stored)} tensors numbered from 0"
        raise CheckpointError(f"{name}: {problem}")
