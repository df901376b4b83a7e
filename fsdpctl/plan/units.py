"""Which parameters are gathered, freed and reduced together.

A unit is a block of the model: each child of the outermost repeated list, the input embedding, the
output head. What is left, and every parameter that several units share, is the root unit.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import FlatLayout, ParamSpec, flat_layout

ROOT = "root"
UnitKind = Literal["block", "embedding", "head", "root"]


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """What the plan needs to know of a module tree."""

    name: str  # dotted, "" for the outermost
    class_name: str
    is_list: bool  # a ModuleList or Sequential
    params: tuple[ParamSpec, ...]  # its own, shared ones under their first name
    children: tuple["ModuleSpec", ...]

    def walk(self) -> Iterator["ModuleSpec"]:
        """This module and all below it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_params(self) -> tuple[ParamSpec, ...]:
        """Each parameter in it once, in module order."""
        seen = {param.name: param for module in self.walk() for param in module.params}
        return tuple(seen.values())


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit: the module whose forward it follows, and its parameters."""

    name: str  # the module's name; "root" for the rest
    kind: UnitKind
    params: tuple[ParamSpec, ...]

    def layouts(self, num_parts: int) -> tuple[FlatLayout, ...]:
        """One flat buffer for each combination of dtype and trainability in it."""
        groups: dict[tuple[str, bool], list[ParamSpec]] = {}
        for param in self.params:
            groups.setdefault((param.dtype, param.trainable), []).append(param)
        return tuple(flat_layout(group, num_parts) for group in groups.values())


def _repeated_children(module: ModuleSpec) -> tuple[ModuleSpec, ...]:
    """The children that make a list of blocks: parameterised, at least two of one class."""
    children = tuple(child for child in module.children if child.all_params())
    counts = Counter(child.class_name for child in children)
    return children if module.is_list and counts and max(counts.values()) >= 2 else ()


def _find_blocks(module: ModuleSpec) -> list[ModuleSpec]:
    blocks = _repeated_children(module)
    if blocks:
        return list(blocks)
    return [block for child in module.children for block in _find_blocks(child)]


def _blocks_of_classes(module: ModuleSpec, classes: Sequence[str]) -> list[ModuleSpec]:
    if module.name and module.class_name in classes:
        return [module] if module.all_params() else []
    return [block for child in module.children for block in _blocks_of_classes(child, classes)]


def _checked_blocks(module: ModuleSpec, classes: Sequence[str] | None) -> list[ModuleSpec]:
    if classes is None:
        return _find_blocks(module)
    blocks = _blocks_of_classes(module, classes)
    if not blocks:
        raise UsageError(f"units={', '.join(classes)}: the model has no such modules")
    return blocks


def divide_into_units(
    module: ModuleSpec,
    *,
    classes: Sequence[str] | None = None,
    embedding: str | None = None,
    head: str | None = None,
) -> tuple[UnitSpec, ...]:
    """The units of a model, root first, then in the order their forward is expected.

    Args:
        module: the whole model.
        classes: names of the module classes to make units of; None finds the repeated blocks.
        embedding: name of the input embedding, where the model names it.
        head: name of the output head, where the model names it.

    Raises:
        UsageError: none of `classes` is in the model.
    """
    kinds: dict[str, UnitKind] = {block.name: "block" for block in _checked_blocks(module, classes)}
    if embedding is not None:
        kinds = {embedding: "embedding", **kinds}
    if head is not None:
        kinds[head] = "head"
    modules = {each.name: each for each in module.walk()}
    members = {name: modules[name].all_params() for name in kinds}
    uses = Counter(param.name for params in members.values() for param in params)
    outside = _used_outside(module, set(kinds))
    shared = {name for name, count in uses.items() if count > 1} | outside
    units = [
        UnitSpec(name, kinds[name], own)
        for name, params in members.items()
        if (own := tuple(param for param in params if param.name not in shared))
    ]
    taken = {param.name for unit in units for param in unit.params}
    rest = tuple(param for param in module.all_params() if param.name not in taken)
    return (UnitSpec(ROOT, "root", rest), *units)


def _used_outside(module: ModuleSpec, unit_names: set[str]) -> set[str]:
    """Names of the parameters that some module outside every unit holds."""
    if module.name in unit_names:
        return set()
    own = {param.name for param in module.params}
    return own.union(*(_used_outside(child, unit_names) for child in module.children))
