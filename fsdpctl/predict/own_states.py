"""What a rank of our engine keeps for good: parameters at rest, and the optimizer's states."""

from fsdpctl.plan.layout import ParamSpec
from fsdpctl.plan.runs import decay_group, optimizer_runs
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.predict.engine_bytes import (
    TrainingPlan,
    held_masters,
    plan_slots,
)
from fsdpctl.predict.script import Category, Writer

_WITHOUT = -1  # the group of parameters that get no gradient


def write_model(plan: TrainingPlan, place: RankPlace, writer: Writer, *, draws: bool) -> None:
    """Building the model; `draws`: its values are made here, a unit at a time."""
    writer.begin()
    writer.at("building the model")
    scratch: dict[int, int] = {}  # by the bytes of an element
    slots = {name: slot for slot in plan_slots(plan) for name in slot.units}
    made: set[str] = set()
    keeps, sizes = plan.strategy.keeps_whole_params, plan.sizes
    for unit, layouts in plan.layouts.items():
        slot = slots[unit]
        is_new = slot.units[0] not in made
        if is_new:
            made.add(slot.units[0])
            key = writer.allocate(Category.GATHERED_UNITS, unit, "slot", slot.nbytes)
        for layout in layouts:
            if layout.shares > 1:
                nbytes = layout.parts[place.rank].numel * sizes.param
                writer.allocate(Category.PARAMETERS, unit, "parts to be gathered", nbytes)
            stays, itemsize = keeps or layout.shares > 1, sizes.kept(layout)
            if not (stays and sizes.param == itemsize):
                nbytes = held_masters(plan, place, layout).numel * itemsize
                what = "master weights" if layout.trainable else "frozen weights"
                writer.allocate(Category.PARAMETERS, unit, what, nbytes)
            if draws and itemsize not in scratch:
                alike = (each for of in plan.layouts.values() for each in of)
                largest = max(each.numel for each in alike if sizes.kept(each) == itemsize)
                scratch[itemsize] = writer.allocate(
                    Category.PARAMETERS, "", "values being drawn", largest * itemsize
                )
        if is_new and not keeps and not slot.resident:
            writer.free(key)
    for key in scratch.values():
        writer.free(key)


def write_states(plan: TrainingPlan, place: RankPlace, writer: Writer) -> None:
    """What the first step makes.

    Of one parameter group after the other; a parameter without gradients has none.
    """
    gradients = writer.program.gradients

    def group_of(param: ParamSpec) -> int:
        return decay_group(param) if param.name in gradients else _WITHOUT

    runs = [
        (run, unit)
        for unit, layouts in plan.layouts.items()
        for layout in layouts
        if layout.trainable
        for run in optimizer_runs(layout, held_masters(plan, place, layout), group_of)
        if run.group != _WITHOUT
    ]
    for run, unit in sorted(runs, key=lambda each: each[0].group):
        nbytes = run.span.numel * plan.sizes.master
        for size in plan.states.of(nbytes):
            writer.allocate(Category.OPTIMIZER_STATES, unit, "optimizer states", size)
