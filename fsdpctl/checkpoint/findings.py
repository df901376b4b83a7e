"""Findings on exported weights: changed and missing tensors, compared with the base."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.manifest import parameter_name
from fsdpctl.checkpoint.tensor_file import FLOATS, cast
from fsdpctl.checkpoint.tensor_source import TensorSource, read_bytes, tensor_keys
from fsdpctl.errors import shorten_list
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.models.adapter_names import is_adapter_name
from fsdpctl.plan.layout import Span

_ELEMENTS_AT_ONCE = 1 << 20
_KINDS = {  # patterns of names; the first match is the tensor's kind
    "experts": r"\bexperts\b", "norms": r"norm|\bln_", "routers": r"router|\bgate\b",
    "attention": r"attn|attention", "mlp": r"mlp|feed_forward|ffn|shared_expert|\bfc",
    "embeddings": r"embed|\bwte\b|\bwpe\b", "head": r"head",
}  # fmt: skip
_EXPERTS = re.compile(r"(.*\bexperts)\.(?:(\d+)\.|\w+$)")  # with an index, unless stacked


@dataclass(frozen=True, slots=True)
class Finding:
    """A line about an export."""

    subject: str  # such as a kind of tensors
    text: str
    is_lost: bool = False  # whether the export lacks trained values, or a part that servers need
    figures: dict[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.subject}: {'lost: ' * self.is_lost}{self.text}"


def lost_finding(subject: str, text: str) -> Finding:
    return Finding(subject, text, is_lost=True)


class WeightChange(NamedTuple):
    """The change of a weight."""

    squared_change: float
    squared_norm: float  # norm of the base; 0 if unknown
    name: str

    @property
    def ratio(self) -> float:
        return (self.squared_change / self.squared_norm) ** 0.5 if self.squared_norm else 0.0


def tensor_kind(name: str) -> str:
    kinds = (kind for kind, pattern in _KINDS.items() if re.search(pattern, name, re.I))
    return next(kinds, "other")


def summarize_changes(changes: Mapping[str, Collection[WeightChange]]) -> Iterator[Finding]:
    """Yield a finding for each kind: the number of changed tensors, and their relative change."""
    for kind, tensors in sorted(changes.items()):
        change, norm = sum(x.squared_change for x in tensors), sum(x.squared_norm for x in tensors)
        changed, total = sum(x.squared_change > 0 for x in tensors), len(tensors)
        text, ratio = f"{changed} of {total} tensors changed", None
        if norm:
            ratio = (change / norm) ** 0.5
            largest = max(tensors, key=lambda x: x.ratio)
            detail = f"at most {100 * largest.ratio:.3g}% ({largest.name})"
            text += f", by {100 * ratio:.3g}% of the base's norm, {detail}" if changed else ""
        figures = {"tensors": total, "changed": changed, "relative_change": ratio}
        yield Finding(kind, text, figures=figures)


def compare_names(export: TensorSource, base: TensorSource) -> Iterator[Finding]:
    """Compare the names, shapes and experts of weights with those of the base."""
    keys, base_keys = {*tensor_keys(export)}, {*tensor_keys(base)}
    base_keys = {key for key in base_keys if not is_adapter_name(key)}
    yield from _name_findings(base_keys - keys, "of the base missing", is_lost=True)
    yield from _name_findings(keys - base_keys, "not in the base", is_lost=False)
    for key in sorted(keys & base_keys):
        shape, base_shape = export.info(key).shape, base.info(key).shape
        kind, text = tensor_kind(parameter_name(key)), f"{parameter_name(key)}: shape {shape}"
        may_grow = kind in ("embeddings", "head") and shape[1:] == base_shape[1:]
        if shape != base_shape:
            is_lost = not may_grow or shape[0] < base_shape[0]  # rows lost
            yield Finding(kind, f"{text}, base {base_shape}", is_lost=is_lost)
    counts, base_counts = _num_experts(export), _num_experts(base)
    for layer, base_count in sorted(base_counts.items()):
        if (count := counts.get(layer, 0)) != base_count:
            yield lost_finding("experts", f"{layer}: {count} experts, base {base_count}")
    if base_counts and counts == base_counts:
        text = " or ".join(map(str, sorted({*counts.values()})))
        yield Finding("experts", f"{text} in each of {len(counts)} layers, as in the base")


def _name_findings(keys: Collection[str], problem: str, *, is_lost: bool) -> Iterator[Finding]:
    names_by_kind: dict[str, list[str]] = defaultdict(list)
    for name in sorted(map(parameter_name, keys)):
        names_by_kind[tensor_kind(name)].append(name)
    for kind, names in names_by_kind.items():
        yield Finding(kind, f"{len(names)} tensors {problem}: {shorten_list(names, 2)}", is_lost)


def _num_experts(weights: TensorSource) -> dict[str, int]:
    indices: dict[str, set[int]] = defaultdict(set)
    for key in tensor_keys(weights):
        shape = weights.info(key).shape
        if (match := _EXPERTS.match(parameter_name(key))) and (match[2] or len(shape) == 3):
            indices[match[1]] |= {int(match[2])} if match[2] else {*range(shape[0])}
    return {layer: len(each) for layer, each in indices.items()}


def compare_values(
    export: TensorSource, base: TensorSource | None, *, is_trained: bool = True
) -> Iterator[Finding]:
    """Compare values with the base's, after rounding these to the export's dtype.

    Without `base`, only check that values are finite. If `is_trained`, report a lack of changes.
    """
    base_keys = {*tensor_keys(base)} if base is not None else set()
    changes: dict[str, list[WeightChange]] = defaultdict(list)
    keys = sorted(tensor_keys(export))
    with doing("comparing", BYTES, sum(export.info(key).nbytes for key in keys)) as advance:
        for key in keys:
            name, kind = parameter_name(key), tensor_kind(parameter_name(key))
            source = base if key in base_keys else None
            change, num_bad, has_nonzero = _compare_tensor(export, source, key)
            if num_bad:
                yield lost_finding(kind, f"{name}: {num_bad:,} values are NaN or infinite")
            if change.squared_norm and not has_nonzero:
                yield lost_finding(kind, f"{name}: only zeros, unlike the base")
            if source is not None:
                changes[kind].append(change)
            advance(export.info(key).nbytes)
    yield from summarize_changes(changes)
    has_changed = any(x.squared_change for tensors in changes.values() for x in tensors)
    if is_trained and changes and not has_changed:
        yield lost_finding("weights", "equal to the base's: trained values missing")


@np.errstate(all="ignore")  # values may not be finite
def _compare_tensor(
    export: TensorSource, base: TensorSource | None, key: str
) -> tuple[WeightChange, int, bool]:
    """Return the change, the number of new non-finite values, and whether any value is not zero.

    If the tensor has more rows than the base's tensor, the first rows are compared.
    """
    name, info = parameter_name(key), export.info(key)
    base_info = info if base is None else base.info(key)
    comparable = base_info.shape == info.shape or (
        base_info.shape[1:] == info.shape[1:] and base_info.numel < info.numel
    )
    delta, norm, num_bad, has_nonzero = 0.0, 0.0, 0, False
    for span in Span(0, info.numel).split(_ELEMENTS_AT_ONCE):
        data, base_data = read_bytes(export, key, span), bytearray()
        if base is not None and comparable and span.start < base_info.numel:
            base_data = read_bytes(base, key, Span(span.start, min(span.stop, base_info.numel)))
        base_values = _as_floats(base_data, base_info.dtype, info.dtype, name)
        is_same = data == base_data and base_info.dtype == info.dtype
        values = base_values if is_same else _as_floats(data, info.dtype, info.dtype, name)
        if not is_same and not np.isfinite(values @ values):  # one pass; it may also overflow
            is_bad = ~np.isfinite(values)
            is_bad[: base_values.size] &= np.isfinite(base_values)
            num_bad += int(is_bad.sum())
            values, base_values = np.nan_to_num(values), np.nan_to_num(base_values)
        difference = values[: base_values.size] - base_values
        delta += 0.0 if is_same else float(difference @ difference)
        norm += float(np.nan_to_num(base_values @ base_values))
        has_nonzero = has_nonzero or bool(values.any())
    return WeightChange(delta, norm, name), num_bad, has_nonzero


def _as_floats(data: bytearray, dtype: str, target: str, name: str) -> NDArray[np.float32]:
    """Return float32 values, first rounded to `target` if that is a float dtype."""
    rounded = memoryview(data)
    if target in FLOATS:
        rounded, dtype = cast(rounded, dtype, target, name), target
    return np.frombuffer(cast(rounded, dtype, "F32", name), np.float32)
