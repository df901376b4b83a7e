"""Findings on exported weights and those of their base: what changed, and what is missing."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.manifest import parameter_name
from fsdpctl.checkpoint.tensor_file import FLOATS, cast
from fsdpctl.checkpoint.tensor_source import TensorSource, tensor_keys
from fsdpctl.errors import shorten_list
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.models.adapter_names import is_adapter_name
from fsdpctl.plan.layout import Span

_ELEMENTS_AT_ONCE = 1 << 20  # which are compared at a time
_KINDS = {  # the kind of a tensor is the first one whose pattern its name has
    "experts": r"\bexperts\b", "norms": r"norm|\bln_", "routers": r"router|\bgate\b",
    "attention": r"attn|attention", "mlp": r"mlp|feed_forward|ffn|shared_expert|\bfc",
    "embeddings": r"embed|\bwte\b|\bwpe\b", "head": r"head",
}  # fmt: skip
_EXPERTS = re.compile(r"(.*\bexperts)\.(?:(\d+)\.|\w+$)")  # and the number of an expert


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
    """The change of a weight: the squared norms of the change and of the base (0 if unknown)."""

    delta: float
    norm: float
    name: str

    @property
    def ratio(self) -> float:
        return (self.delta / self.norm) ** 0.5 if self.norm else 0.0


def tensor_kind(name: str) -> str:
    return next((kind for kind, part in _KINDS.items() if re.search(part, name, re.I)), "other")


def summarize_changes(changes: Mapping[str, Collection[WeightChange]]) -> Iterator[Finding]:
    """Yield a finding for each kind: the number of changed tensors, and their relative change."""
    for kind, of_kind in sorted(changes.items()):
        delta, norm, most = sum(x.delta for x in of_kind), sum(x.norm for x in of_kind), ""
        changed, total = sum(x.delta > 0 for x in of_kind), len(of_kind)
        ratio = (delta / norm) ** 0.5 if norm else None
        if changed and ratio is not None:
            largest = max(of_kind, key=lambda x: x.ratio)
            most = f", by {100 * ratio:.3g}% of the base's norm, at most "
            most += f"{100 * largest.ratio:.3g}% ({largest.name})"
        figures = {"tensors": total, "changed": changed, "relative_change": ratio}
        yield Finding(kind, f"{changed} of {total} tensors changed{most}", figures=figures)


def compare_names(ours: TensorSource, theirs: TensorSource) -> Iterator[Finding]:
    """Compare the names, shapes and experts of weights with those of the base."""
    here, there = {*tensor_keys(ours)}, {x for x in tensor_keys(theirs) if not is_adapter_name(x)}
    for keys, what in ((there - here, "of the base missing"), (here - there, "not in the base")):
        of_kind: dict[str, list[str]] = defaultdict(list)
        for name in sorted(map(parameter_name, keys)):
            of_kind[tensor_kind(name)].append(name)
        for kind, names in of_kind.items():
            text = f"{len(names)} tensors {what}: {shorten_list(names, 2)}"
            yield Finding(kind, text, is_lost=keys <= there)
    for key in sorted(here & there):
        one, other, name = ours.info(key).shape, theirs.info(key).shape, parameter_name(key)
        grown = tensor_kind(name) in ("embeddings", "head") and one[1:] == other[1:]
        if one != other:
            text = f"{name}: shape {one}, base {other}"
            yield Finding(tensor_kind(name), text, is_lost=not grown or one < other)
    counts, known = _experts(ours), _experts(theirs)
    for layer in (each for each in sorted(known) if counts.get(each) != known[each]):
        yield lost_finding(
            "experts", f"{layer}: {counts.get(layer, 0)} experts, base {known[layer]}"
        )
    if known and counts == known:
        most = " or ".join(map(str, sorted({*known.values()})))
        yield Finding("experts", f"{most} in each of {len(known)} layers, as in the base")


def _experts(weights: TensorSource) -> dict[str, int]:
    numbers: dict[str, set[int]] = defaultdict(set)
    for key in tensor_keys(weights):
        shape = weights.info(key).shape
        if (match := _EXPERTS.match(parameter_name(key))) and (match[2] or len(shape) == 3):
            numbers[match[1]] |= {int(match[2])} if match[2] else {*range(shape[0])}
    return {layer: len(each) for layer, each in numbers.items()}


def compare_values(
    ours: TensorSource, theirs: TensorSource | None, *, is_trained: bool = True
) -> Iterator[Finding]:
    """Compare values with the base's values, rounded to the dtype of the export.

    Without `theirs`, only check that values are finite.
    """
    known = {*tensor_keys(theirs)} if theirs is not None else set()
    changes: dict[str, list[WeightChange]] = defaultdict(list)
    keys = sorted(tensor_keys(ours))
    with doing("comparing", BYTES, sum(ours.info(key).nbytes for key in keys)) as advance:
        for key in keys:
            base, name = theirs if key in known else None, parameter_name(key)
            change, bad, has_any = _compare_tensor(ours, base, key)
            if bad:
                yield lost_finding(tensor_kind(name), f"{name}: {bad:,} values are NaN or infinite")
            if change.norm and not has_any:
                yield lost_finding(tensor_kind(name), f"{name}: only zeros, and not in the base")
            if base is not None:
                changes[tensor_kind(name)].append(change)
            advance(ours.info(key).nbytes)
    yield from summarize_changes(changes)
    if is_trained and changes and not any(x.delta for each in changes.values() for x in each):
        yield lost_finding("weights", "all equal the base's; nothing that was trained is there")


@np.errstate(all="ignore")  # values may not be finite
def _compare_tensor(
    ours: TensorSource, theirs: TensorSource | None, key: str
) -> tuple[WeightChange, int, bool]:
    """Return the change, the number of new NaNs, and whether any value is not zero.

    If the tensor has more rows than the base's tensor, the first rows are compared.
    """
    info = ours.info(key)
    other = info if theirs is None else theirs.info(key)
    is_alike = other.shape == info.shape or (
        other.shape[1:] == info.shape[1:] and other.numel < info.numel
    )
    delta, norm, num_bad, has_any = 0.0, 0.0, 0, False
    for span in Span(0, info.numel).split(_ELEMENTS_AT_ONCE):
        data, base_data = _read_bytes(ours, key, span), bytearray()
        if theirs is not None and is_alike and span.start < other.numel:
            base_data = _read_bytes(theirs, key, Span(span.start, min(span.stop, other.numel)))
        base = _as_floats(base_data, other.dtype, info.dtype)
        is_same = data == base_data and other.dtype == info.dtype
        values = base if is_same else _as_floats(data, info.dtype, info.dtype)
        if not is_same and not np.isfinite(values @ values):
            is_bad = ~np.isfinite(values)
            is_bad[: base.size] &= np.isfinite(base)
            num_bad, values, base = (
                num_bad + int(is_bad.sum()),
                np.nan_to_num(values),
                np.nan_to_num(base),
            )
        difference = values[: base.size] - base
        delta += 0.0 if is_same else float(difference @ difference)
        norm += float(np.nan_to_num(base @ base))
        has_any = has_any or bool(values.any())
    return WeightChange(delta, norm, parameter_name(key)), num_bad, has_any


def _read_bytes(weights: TensorSource, key: str, span: Span) -> bytearray:
    content = bytearray()
    for _, data in weights.read(key, span):
        content += data
    return content


def _as_floats(data: bytearray, dtype: str, rounded: str) -> NDArray[np.float32]:
    if rounded in FLOATS and rounded != dtype:
        return _as_floats(bytearray(cast(memoryview(data), dtype, rounded, "")), rounded, rounded)
    return np.frombuffer(cast(memoryview(data), dtype, "F32", ""), np.float32)
