"""Findings on exported weights and those of their base: what changed, and what is missing."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fsdpctl.checkpoint.manifest import parameter_name
from fsdpctl.checkpoint.source import Tensors, tensor_keys
from fsdpctl.checkpoint.tensor_file import FLOATS, cast
from fsdpctl.config.peft import is_adapter
from fsdpctl.errors import first_of
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.plan.layout import Span

_ELEMENTS = 1 << 20  # compared at a time
_KINDS = {  # the first that the name of a tensor has
    "experts": r"\bexperts\b",
    "norms": r"norm|\bln_",
    "routers": r"router|\bgate\b",
    "attention": r"attn|attention",
    "mlp": r"mlp|feed_forward|ffn|shared_expert|\bfc",
    "embeddings": r"embed|\bwte\b|\bwpe\b",
    "head": r"head",
}
_PER_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.")
_STACKED = re.compile(r".*\bexperts(?=\.\w+$)")


@dataclass(frozen=True, slots=True)
class Finding:
    """A line about an export."""

    subject: str  # such as a kind of tensors
    text: str
    is_lost: bool = False  # what was trained, or what a server needs, is not in the export
    figures: dict[str, float | None] = field(default_factory=dict)  # of a kind of tensors

    def __str__(self) -> str:
        return f"{self.subject}: {'lost: ' * self.is_lost}{self.text}"


def kind_of(name: str) -> str:
    return next((kind for kind, part in _KINDS.items() if re.search(part, name, re.I)), "other")


def compare_weights(
    ours: Tensors, theirs: Tensors | None, *, is_trained: bool = True
) -> Iterator[Finding]:
    """Compare weights with those of the base under the same names; None: there is no base."""
    if theirs is not None:
        yield from _names(ours, theirs)
    yield from compare_values(ours, theirs, is_trained=is_trained)


def _names(ours: Tensors, theirs: Tensors) -> Iterator[Finding]:
    here, there = {*tensor_keys(ours)}, {x for x in tensor_keys(theirs) if not is_adapter(x)}
    for kind, names in _by_kind(there - here).items():
        yield Finding(kind, f"{len(names)} tensors of the base missing: {first_of(names, 2)}", True)
    for kind, names in _by_kind(here - there).items():
        yield Finding(kind, f"{len(names)} tensors that the base lacks: {first_of(names, 2)}")
    for key in sorted(here & there):
        one, other = ours.info(key).shape, theirs.info(key).shape
        if one == other:
            continue
        name = parameter_name(key)
        kind = kind_of(name)
        grown = kind in ("embeddings", "head") and one[1:] == other[1:] and one[0] > other[0]
        rows = f"{one[0]:,} rows for tokens, of which the base has {other[0]:,}"
        yield Finding(kind, f"{name}: {rows if grown else f'shape {one}, base {other}'}", not grown)
    counts, known = _experts(ours), _experts(theirs)
    for layer in sorted(known):
        if counts.get(layer) != known[layer]:
            count = counts.get(layer, 0)
            yield Finding("experts", f"{layer}: {count} experts, base {known[layer]}", True)
    if known and counts == known:
        most = " or ".join(map(str, sorted({*known.values()})))
        yield Finding("experts", f"{most} in each of {len(known)} layers, as in the base")


def _by_kind(keys: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(map(parameter_name, keys)):
        found[kind_of(name)].append(name)
    return found


def _experts(weights: Tensors) -> dict[str, int]:
    """Return the number of experts of each layer."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for key in tensor_keys(weights):
        name = parameter_name(key)
        if match := _PER_EXPERT.match(name):
            numbers[match[1]].add(int(match[2]))
        elif (match := _STACKED.match(name)) and len(shape := weights.info(key).shape) == 3:
            numbers[match[0]] |= {*range(shape[0])}
    return {layer: len(each) for layer, each in numbers.items()}


@dataclass(slots=True)
class _Change:
    """The change of the tensors of a kind: sums of squares, and the largest relative change."""

    tensors: int = 0
    changed: int = 0
    delta: float = 0.0
    norm: float = 0.0
    most: tuple[float, str] = (0.0, "")


def compare_values(
    ours: Tensors, theirs: Tensors | None, *, is_trained: bool = True
) -> Iterator[Finding]:
    """Compare the values; a base of another dtype is rounded to that of the export first."""
    known = {*tensor_keys(theirs)} if theirs is not None else set()
    changes: dict[str, _Change] = defaultdict(_Change)
    keys = sorted(tensor_keys(ours))
    with doing("comparing", BYTES, sum(ours.info(key).nbytes for key in keys)) as advance:
        for key in keys:
            name, info = parameter_name(key), ours.info(key)
            numel = info.numel
            if theirs is not None and key in known:
                other = theirs.info(key)
                has_rows = info.shape[1:] == other.shape[1:] and info.shape[0] >= other.shape[0]
                numel = other.numel if has_rows or info.shape == other.shape else 0
            base = theirs if key in known else None
            delta, norm, bad, is_zero = _compared(ours, base, key, numel)
            if bad:
                yield Finding(kind_of(name), f"{name}: {bad:,} values are NaN or infinite", True)
            if is_zero:
                yield Finding(kind_of(name), f"{name}: only zeros, and not in the base", True)
            if base is not None:
                _add(changes[kind_of(name)], delta, norm, name)
            advance(info.nbytes)
    for kind, each in sorted(changes.items()):
        most, name = each.most
        counts, squares = (each.changed, each.tensors), (each.delta, each.norm)
        yield change_of(kind, counts, squares, f", at most {share(most)} ({name})")
    if is_trained and changes and not any(each.changed for each in changes.values()):
        yield Finding("weights", "all equal the base's; nothing that was trained is there", True)


@np.errstate(all="ignore")  # of what is not finite
def _compared(
    ours: Tensors, theirs: Tensors | None, key: str, numel: int
) -> tuple[float, float, int, bool]:
    """Return the squared norms of the change and the base, new NaNs, and whether all is zero.

    The first `numel` elements are compared.
    """
    delta = norm = 0.0
    bad, has_any, info = 0, False, ours.info(key)
    of_base = info if theirs is None else theirs.info(key)
    for span in Span(0, info.numel).cut(_ELEMENTS):
        data, known = _bytes(ours, key, span), bytearray()
        if theirs is not None and span.start < numel:
            known = _bytes(theirs, key, Span(span.start, min(span.stop, numel)))
        is_same = data == known and info.dtype == of_base.dtype
        base = _floats(known, of_base.dtype, info.dtype)
        values = base if is_same else _floats(data, info.dtype, info.dtype)
        if not is_same and not np.isfinite(values @ values):
            is_bad = ~np.isfinite(values)
            is_bad[: base.size] &= np.isfinite(base)
            bad, values, base = bad + int(is_bad.sum()), np.nan_to_num(values), np.nan_to_num(base)
        if not is_same:
            difference = values[: base.size] - base
            delta += float(difference @ difference)
        norm += float(np.nan_to_num(base @ base))
        has_any = has_any or bool(values.any())
    return delta, norm, bad, norm > 0 and not has_any


def _bytes(weights: Tensors, key: str, span: Span) -> bytearray:
    found = bytearray()
    for _, data in weights.read(key, span):
        found += data
    return found


def _floats(data: bytearray, dtype: str, rounded: str) -> NDArray[np.float32]:
    """Return values in float32, rounded to a dtype of the export."""
    if rounded in FLOATS and rounded != dtype:
        return _floats(bytearray(cast(memoryview(data), dtype, rounded, "")), rounded, rounded)
    return np.frombuffer(cast(memoryview(data), dtype, "F32", ""), np.float32)


def _add(change: _Change, delta: float, norm: float, name: str) -> None:
    change.tensors += 1
    change.changed += delta > 0
    change.delta, change.norm = change.delta + delta, change.norm + norm
    change.most = max(change.most, ((delta / norm) ** 0.5 if norm else 0.0, name))


def change_of(
    kind: str, counts: tuple[int, int], squares: tuple[float, float], more: str
) -> Finding:
    """Return a line about a kind: how many changed of how many, and by how much.

    `squares` are the squared norms of the change and of the base, 0 if that is unknown.
    """
    (changed, total), (delta, norm) = counts, squares
    ratio = (delta / norm) ** 0.5 if norm else None
    by = f", by {share(ratio)} of the base's norm{more}" if changed and ratio is not None else ""
    figures = {"tensors": total, "changed": changed, "relative_change": ratio}
    return Finding(kind, f"{changed} of {total} tensors changed{by}", figures=figures)


def share(value: float) -> str:
    return f"{100 * value:.3g}%"
