"""The units of a model: parameters that are gathered, freed and reduced together.

Units are the children of the outermost repeated list (blocks), the input embedding and the output
head. The root unit has all other parameters, and those that several units share.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    lookups: frozenset[str] = frozenset()  # units whose backward reads no weights: embeddings
    frozen: frozenset[str] = frozenset()  # units without a trained parameter
    blocks: frozenset[str] = frozenset()  # repeated units
    without_backward: frozenset[str] = frozenset()  # units before every trained parameter

    @property
    def backward_units(self) -> tuple[str, ...]:
        """The units that have a backward, in the order of backward."""
        return tuple(u for u in reversed(self.forward) if u not in self.without_backward)

    @property
    def backward_readers(self) -> tuple[str, ...]:
        """The units whose backward reads weights, in the order of backward."""
        return tuple(unit for unit in reversed(self.forward) if self._reads_weights(unit))

    @property
    def reduction_order(self) -> tuple[str, ...]:
        """The units in the order in which all ranks start their reductions."""
        return (*reversed(self.forward), self.root)

    def trains(self, unit: str) -> bool:
        return unit not in self.frozen

    def stays_unsharded(self, unit: str, strategy: Strategy) -> bool:
        """Return whether a unit stays unsharded from its forward to its backward."""
        # The backward of the last unit follows at once.
        keeps = not strategy.reshard_after_forward or unit == self.forward[-1]
        return keeps and self._reads_weights(unit)

    def is_gathered_again(self, unit: str, strategy: Strategy) -> bool:
        """Return whether backward gathers a unit again; the strategy must shard parameters."""
        return self._reads_weights(unit) and not self.stays_unsharded(unit, strategy)

    def _reads_weights(self, unit: str) -> bool:
        return unit not in self.without_backward and unit not in self.lookups


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
    params: tuple[ParamSpec, ...]  # direct parameters; shared ones have their first name
    children: tuple["ModuleSpec", ...]
    is_lookup: bool = False  # an embedding, whose backward reads no weights

    def walk(self) -> Iterator["ModuleSpec"]:
        """Yield this module and all its descendants, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_params(self) -> tuple[ParamSpec, ...]:
        """Return each parameter of this module and its descendants once, in module order."""
        seen = {param.name: param for module in self.walk() for param in module.params}
        return tuple(seen.values())


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit: the module whose forward gathers it, and its parameters."""

    name: str  # the module's name, or "root"
    kind: UnitKind
    params: tuple[ParamSpec, ...]
    is_lookup: bool = False  # the backward reads no weights
    has_backward: bool = True  # a parameter of this or an earlier unit is trained

    def param_groups(self) -> list[list[ParamSpec]]:
        """Group the parameters by dtype and trainability: each group fills one flat buffer."""
        groups: dict[tuple[str, bool], list[ParamSpec]] = {}
        for param in self.params:
            groups.setdefault((param.dtype, param.trainable), []).append(param)
        return list(groups.values())


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The units of a model, the layouts of their flat buffers, and the effective strategy."""

    units: tuple[UnitSpec, ...]  # the root first
    layouts: dict[str, tuple[FlatLayout, ...]]  # flat buffers by unit
    strategy: Strategy
    ranks_per_replica: int = 1

    @property
    def order(self) -> UnitOrder:
        root, *others = units = self.units
        return UnitOrder(
            root.name,
            forward=tuple(unit.name for unit in others),
            lookups=frozenset(unit.name for unit in units if unit.is_lookup),
            frozen=frozenset(x.name for x in units if not any(p.trainable for p in x.params)),
            blocks=frozenset(unit.name for unit in units if unit.kind == "block"),
            without_backward=frozenset(unit.name for unit in units if not unit.has_backward),
        )


def lay_out(
    units: tuple[UnitSpec, ...],
    strategy: Strategy,
    num_ranks: int,
    ranks_per_replica: int,
    owner_map: str | OwnerMap,
    *,
    shares_memory: bool = False,
    offloads_params: bool = False,
) -> ModelLayout:
    """Lay out the units for `num_ranks` ranks, in replicas of the requested `ranks_per_replica`.

    The result has the effective number. `shares_memory`: all ranks share the memory of one machine.
    `offloads_params`: parameters are in host memory between steps.
    """
    options = {"shares_memory": shares_memory, "offloads_params": offloads_params}
    effective, num_shards = effective_strategy(strategy, ranks_per_replica, num_ranks, **options)
    owner_map = owner_map if effective.has_owner_map else "even"
    num_shares = effective.shares_per_shard(num_ranks // num_shards)
    layouts = unit_layouts(units, num_shards, owner_map, num_shares=num_shares)
    return ModelLayout(units, layouts, effective, num_shards)


def unit_layouts(
    units: Sequence[UnitSpec],
    num_shards: int,
    owner_map: str | OwnerMap = "even",
    *,
    num_shares: int = 1,
) -> dict[str, tuple[FlatLayout, ...]]:
    """Return the flat buffers of every unit, with shards for `num_shards` ranks.

    With the even map, each shard has `num_shares` shares. Other maps assign flat buffers in order.
    """
    if owner_map == "even":
        layout = partial(flat_layout, num_shards=num_shards, num_shares=num_shares)
        return {unit.name: tuple(map(layout, unit.param_groups())) for unit in units}
    uncut = {x.name: [flat_layout(g, num_shards=1) for g in x.param_groups()] for x in units}
    flats = [layout for layouts in uncut.values() for layout in layouts]
    sizes = [each.numel for each in flats]
    if owner_map == MATRICES:
        owners = matrix_owners(flats, num_shards)
    elif isinstance(owner_map, str):
        owners = make_owner_map(owner_map, sizes, num_shards)
    else:
        owners = owner_map.for_sizes(sizes, num_shards)
    spans = iter(owners.spans)  # in the order of `flats`
    return {
        name: tuple(replace(each, shard_spans=next(spans)) for each in layouts)
        for name, layouts in uncut.items()
    }


def _find_blocks(module: ModuleSpec) -> list[ModuleSpec]:
    """Return the children with parameters of the outermost lists of blocks.

    A list of blocks is a ModuleList or Sequential with two or more children of one class. Its other
    children are blocks, too.
    """
    children = [child for child in module.children if child.all_params()]
    counts = Counter(child.class_name for child in children)
    repeats = max(counts.values(), default=0) >= 2
    if module.is_list and repeats and all(child.is_called for child in children):
        return children
    return [block for child in module.children for block in _find_blocks(child)]


def _blocks_of_classes(module: ModuleSpec, classes: Sequence[str]) -> list[ModuleSpec]:
    if module.name and module.class_name in classes:  # without a name: the root, not a block
        return [module] if module.all_params() else []
    return [block for child in module.children for block in _blocks_of_classes(child, classes)]


def divide_into_units(
    module: ModuleSpec,
    *,
    classes: Sequence[str] | None = None,
    embedding: str | None = None,
    head: str | None = None,
) -> tuple[UnitSpec, ...]:
    """Return the units of a model: the root first, then in the expected forward order.

    Each module of `classes` becomes a unit; None selects the repeated blocks. `embedding` and
    `head` are the names of the input embedding and the output head, if the model has them.
    """
    blocks = _find_blocks(module) if classes is None else _blocks_of_classes(module, classes)
    if classes is not None and not blocks:
        raise UsageError(f"units={', '.join(classes)}: not found in the model")
    kinds: dict[str, UnitKind] = {block.name: "block" for block in blocks}
    if embedding is not None:
        kinds = {embedding: "embedding", **kinds}
    if head is not None:
        kinds[head] = "head"
    modules = {each.name: each for each in module.walk()}
    members = {name: modules[name].all_params() for name in kinds}
    uses = Counter(param.name for params in members.values() for param in params)
    trained_and_later = _trained_and_later(module.all_params())
    outside = _used_outside(module, set(kinds))
    shared = {name for name, count in uses.items() if count > 1} | outside
    units = []
    for name, params in members.items():
        kind, is_lookup = kinds[name], name == embedding and modules[name].is_lookup
        exclusive = [replace(x, in_block=kind == "block") for x in params if x.name not in shared]
        if exclusive:
            has_backward = any(param.name in trained_and_later for param in params)
            units.append(UnitSpec(name, kind, tuple(exclusive), is_lookup, has_backward))
    assigned = {param.name for unit in units for param in unit.params}
    remaining = tuple(param for param in module.all_params() if param.name not in assigned)
    return (UnitSpec(ROOT, "root", remaining), *units)


def _trained_and_later(params: Sequence[ParamSpec]) -> set[str]:
    """Return the names of the first trained parameter and all parameters defined after it.

    The plan assumes that parameters are used in the order of their definition. In a model that uses
    them otherwise, the engine still follows autograd, and only the plan is less exact.
    """
    first = next((i for i, param in enumerate(params) if param.trainable), len(params))
    return {param.name for param in params[first:]}


def _used_outside(module: ModuleSpec, unit_names: set[str]) -> set[str]:
    """Return the names of the direct parameters of modules that are in no unit."""
    if module.name in unit_names:
        return set()
    names = {param.name for param in module.params}
    return names.union(*(_used_outside(child, unit_names) for child in module.children))
