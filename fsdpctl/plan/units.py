"""The units of a model: parameters that are gathered, freed and reduced together.

A unit is a block of the model: each child of the outermost repeated list, the input embedding, the
output head. Everything else, and every parameter that several units share, is the root unit.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fsdpctl.errors import UsageError
from fsdpctl.plan.layout import FlatLayout, ParamSpec, flat_layout
from fsdpctl.plan.optimizers import MATRICES, matrix_owners
from fsdpctl.plan.owner_map import OwnerMap, make_owner_map
from fsdpctl.plan.strategy import Strategy, effective_strategy


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """The units other than the root in forward order, and their properties."""

    root: str
    forward: tuple[str, ...]
    needs_no_backward_gather: frozenset[str] = frozenset()  # the embedding reads no weights there
    frozen: frozenset[str] = frozenset()  # units without a trained parameter
    blocks: frozenset[str] = frozenset()  # the repeated units
    without_backward: frozenset[str] = frozenset()  # units without a backward

    @property
    def backward_units(self) -> tuple[str, ...]:
        """The units that have a backward, in backward order."""
        return tuple(u for u in reversed(self.forward) if u not in self.without_backward)

    @property
    def backward_gathers(self) -> tuple[str, ...]:
        """The units gathered for backward, in that order."""
        return tuple(unit for unit in reversed(self.forward) if self._reads_weights(unit))

    @property
    def reduction_order(self) -> tuple[str, ...]:
        """The order in which all ranks start the reductions."""
        return (*reversed(self.forward), self.root)

    def trains(self, unit: str) -> bool:
        return unit not in self.frozen

    def stays_unsharded(self, unit: str, strategy: Strategy) -> bool:
        """Return whether a unit stays unsharded from its forward to its backward."""
        if not self._reads_weights(unit):
            return False
        return not strategy.reshard_after_forward or unit == self.forward[-1]

    def is_gathered_again(self, unit: str, strategy: Strategy) -> bool:
        """Return whether backward gathers a unit, if parameters are sharded."""
        keeps = self.stays_unsharded(unit, strategy)
        return self._reads_weights(unit) and not keeps

    def _reads_weights(self, unit: str) -> bool:
        return unit not in self.without_backward and unit not in self.needs_no_backward_gather


def following_units(order: Sequence[str], depth: int) -> dict[str, tuple[str, ...]]:
    """Map each unit to the `depth` units that follow it in `order`."""
    return {unit: tuple(order[index + 1 : index + 1 + depth]) for index, unit in enumerate(order)}


ROOT = "root"
UnitKind = Literal["block", "embedding", "head", "root"]


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The properties of a module tree that the plan depends on."""

    name: str  # dotted, "" for the outermost
    class_name: str
    is_list: bool  # a ModuleList or Sequential
    is_called: bool  # has a forward; a ModuleList has none
    params: tuple[ParamSpec, ...]  # its own, shared ones under their first name
    children: tuple["ModuleSpec", ...]
    is_lookup: bool = False  # an embedding, whose backward reads no weights

    def walk(self) -> Iterator["ModuleSpec"]:
        """Yield this module and all below it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_params(self) -> tuple[ParamSpec, ...]:
        """Return each parameter in it once, in module order."""
        seen = {param.name: param for module in self.walk() for param in module.params}
        return tuple(seen.values())


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit: the module whose forward it follows, and its parameters."""

    name: str  # the module's name; "root" for the rest
    kind: UnitKind
    params: tuple[ParamSpec, ...]
    is_lookup: bool = False  # its backward reads no weights
    has_backward: bool = True  # something in it is trained, or before it

    def param_groups(self) -> list[list[ParamSpec]]:
        """Return its parameters by dtype and trainability: a flat buffer each."""
        groups: dict[tuple[str, bool], list[ParamSpec]] = {}
        for param in self.params:
            groups.setdefault((param.dtype, param.trainable), []).append(param)
        return list(groups.values())


def unit_order(units: Sequence[UnitSpec]) -> UnitOrder:
    """Return the order in which units run, without the root."""
    root, *others = units
    return UnitOrder(
        root.name,
        tuple(unit.name for unit in others),
        frozenset(unit.name for unit in units if unit.is_lookup),
        frozenset(unit.name for unit in units if not any(p.trainable for p in unit.params)),
        frozenset(unit.name for unit in units if unit.kind == "block"),
        frozenset(unit.name for unit in units if not unit.has_backward),
    )


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The units of a model, the parts of their flat buffers, and the strategy that runs."""

    units: tuple[UnitSpec, ...]
    layouts: dict[str, tuple[FlatLayout, ...]]  # by unit
    strategy: Strategy
    ranks_per_replica: int = 1

    @property
    def order(self) -> UnitOrder:
        return unit_order(self.units)


def lay_out(
    units: tuple[UnitSpec, ...],
    strategy: Strategy,
    num_ranks: int,
    replica_size: int,
    owner_map: str | OwnerMap,
    *,
    shares_memory: bool = False,
    offloads_params: bool = False,
) -> ModelLayout:
    """Divide the units over the ranks, of which `replica_size` share a replica if any do.

    All ranks may share the memory of one machine, and parameters may rest on the host.
    """
    about = {"shares_memory": shares_memory, "offloads_params": offloads_params}
    effective, parts = effective_strategy(strategy, replica_size, num_ranks, **about)
    owner_map = owner_map if effective.has_owner_map else "even"
    layouts = unit_layouts(
        units, parts, owner_map, shares_per_shard=effective.shares_per_shard(num_ranks // parts)
    )
    return ModelLayout(units, layouts, effective, parts)


def unit_layouts(
    units: Sequence[UnitSpec],
    num_shards: int,
    owner_map: str | OwnerMap = "even",
    *,
    shares_per_shard: int = 1,
) -> dict[str, tuple[FlatLayout, ...]]:
    """Return the flat buffers of every unit, cut into `num_parts` parts of `shares` each.

    The blocks of `owner_map` are the flat buffers in order.
    """
    if owner_map == "even":
        groups = {unit.name: unit.param_groups() for unit in units}
        return {
            x: tuple(flat_layout(y, num_shards, shares_per_shard) for y in groups[x])
            for x in groups
        }
    uncut = {unit.name: [flat_layout(g, 1) for g in unit.param_groups()] for unit in units}
    sizes = [layout.numel for layouts in uncut.values() for layout in layouts]
    if owner_map == MATRICES:
        owners = matrix_owners([each for of_unit in uncut.values() for each in of_unit], num_shards)
    elif isinstance(owner_map, str):
        owners = make_owner_map(owner_map, sizes, num_shards)
    else:
        owners = owner_map.for_sizes(sizes, num_shards)
    parts = iter(owners.spans)
    return {
        name: tuple(
            FlatLayout(x.param_spans, x.numel, next(parts), x.shares_per_shard) for x in layouts
        )
        for name, layouts in uncut.items()
    }


def _repeated_children(module: ModuleSpec) -> tuple[ModuleSpec, ...]:
    """Return the children that make a list of blocks: with parameters, two or more of a class."""
    children = tuple(child for child in module.children if child.all_params())
    if not all(child.is_called for child in children):
        return ()
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
        raise UsageError(f"units={', '.join(classes)}: not found in the model")
    return blocks


def divide_into_units(
    module: ModuleSpec,
    *,
    classes: Sequence[str] | None = None,
    embedding: str | None = None,
    head: str | None = None,
) -> tuple[UnitSpec, ...]:
    """Return the units of a model: the root first, then in the expected forward order.

    `classes` are the module classes to make units of; None finds the repeated blocks. Input
    `embedding` and output `head` are given by name, if the model names them.
    """
    kinds: dict[str, UnitKind] = {block.name: "block" for block in _checked_blocks(module, classes)}
    if embedding is not None:
        kinds = {embedding: "embedding", **kinds}
    if head is not None:
        kinds[head] = "head"
    modules = {each.name: each for each in module.walk()}
    members = {name: modules[name].all_params() for name in kinds}
    uses = Counter(param.name for params in members.values() for param in params)
    behind = _behind_what_is_trained(module.all_params())
    outside = _used_outside(module, set(kinds))
    shared = {name for name, count in uses.items() if count > 1} | outside
    units = []
    for name, params in members.items():
        kind, is_lookup = kinds[name], name == embedding and modules[name].is_lookup
        own = tuple(replace(x, in_block=kind == "block") for x in params if x.name not in shared)
        if own:
            has_backward = any(param.name in behind for param in params)
            units.append(UnitSpec(name, kind, own, is_lookup, has_backward))
    taken = {param.name for unit in units for param in unit.params}
    rest = tuple(param for param in module.all_params() if param.name not in taken)
    return (UnitSpec(ROOT, "root", rest), *units)


def _behind_what_is_trained(params: Sequence[ParamSpec]) -> set[str]:
    """Return the names of the parameters from the first trained one on, in definition order.

    Parameters, like units, are expected to be used in that order. If they aren't, the engine still
    follows autograd, and only the plan is less exact.
    """
    first = next((i for i, param in enumerate(params) if param.trainable), len(params))
    return {param.name for param in params[first:]}


def _used_outside(module: ModuleSpec, unit_names: set[str]) -> set[str]:
    """Return the names of the parameters that a module outside every unit holds."""
    if module.name in unit_names:
        return set()
    own = {param.name for param in module.params}
    return own.union(*(_used_outside(child, unit_names) for child in module.children))
