"""Draws docs/how-it-works.svg from the plan: when units are unsharded, which rank holds what."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.planned_steps import plan_training
from fsdpctl.models.build_model import build_model
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.buffers import planned_step
from fsdpctl.plan.schedule import Event, EventKind
from fsdpctl.plan.step_plan import StepPlan
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan

NUM_RANKS = 4
SETTINGS = [
    "model=llama3_8b", "model.num_layers=4", "cluster=h100", f"launch.nproc_per_node={NUM_RANKS}",
    "strategy=full_shard",
]  # fmt: skip
K = EventKind
# Widths of the events in which the model computes; all other events only have an order.
_WIDE = {K.FORWARD: 5, K.BACKWARD: 8}
_WIDTH, _LEFT, _RIGHT, _ROW = 920, 100, 904, 26
_SHARD, _WHOLE, _ARRIVING = "#2f5fd0", "#9dbbf7", "#dfe9ff"
_GRADS, _STATES, _OUTLINE, _RULE = "#f0a030", "#3fae8f", "#777777", "#dddddd"
# Later colors are drawn over earlier ones.
_COLORS = {
    _ARRIVING: "gather in flight", _WHOLE: "unit unsharded", _SHARD: "shard of the parameters",
    _GRADS: "gradients", _STATES: "optimizer states",
}  # fmt: skip


class _Canvas:
    """A canvas with boxes by color, and texts over them."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[str]] = defaultdict(list)
        self._texts: list[str] = []

    def box(self, color: str, x: float, y: float, width: float, height: float) -> None:
        self._boxes[color].append(f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h{-width:.1f}z")

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "", bold: bool = False, size: int = 12
    ) -> None:
        style = f' text-anchor="{anchor}"' * bool(anchor) + ' font-weight="bold"' * bold
        style += f' font-size="{size}"' * (size != 12)
        self._texts.append(f'<text x="{x:.1f}" y="{y:g}"{style}>{text}</text>')

    def svg(self, height: float) -> str:
        paths = [f'<path fill="{each}" d="{"".join(self._boxes[each])}"/>' for each in _COLORS]
        paths += [
            f'<path fill="none" stroke="{each}" d="{"".join(self._boxes[each])}"/>'
            for each in (_RULE, _OUTLINE)
        ]
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" '
            'font-family="sans-serif" font-size="12" fill="#1a1a1a">',
            '<rect width="100%" height="100%" fill="#ffffff"/>', *paths, *self._texts, "</svg>", "",
        ])  # fmt: skip


def draw_how_it_works(file: Path) -> None:
    """Draw the units over a step, and below four moments of the step on four ranks."""
    config = make_run_plan(prepare(compose_config(SETTINGS), ESTIMATE_ROLE).config).config
    plan = plan_training(config, module_units(build_model(config.model), None), 1)
    planned = planned_step(plan.step_plan, plan.reduces_gradients)
    events = [event for event in planned if event.kind not in (K.ALLOCATE, K.DEALLOCATE)]
    units = [*plan.step_plan.order.forward, plan.step_plan.order.root]
    canvas = _Canvas()
    _draw_timeline(canvas, events, units)
    top = 70 + _ROW * len(units)
    _draw_moments(canvas, plan.step_plan, events, units, top)
    bottom = top + 60 + 44 * NUM_RANKS
    for number, (color, meaning) in enumerate(_COLORS.items()):
        canvas.box(color, 62 + number * 172, bottom, 13, 13)
        canvas.text(81 + number * 172, bottom + 11, meaning)
    file.write_text(canvas.svg(bottom + 28))


def _draw_timeline(canvas: _Canvas, events: Sequence[Event], units: Sequence[str]) -> None:
    widths = [_WIDE.get(each.kind, 1) for each in events]
    scale = (_RIGHT - _LEFT) / sum(widths)
    at = [_LEFT + scale * sum(widths[:i]) for i in range(len(events) + 1)]
    turn = at[next(i for i, each in enumerate(events) if each.kind is K.BACKWARD)]
    canvas.text(16, 20, "A step of one rank, in the order of the plan", bold=True)
    canvas.text((_LEFT + turn) / 2, 42, "forward", anchor="middle")
    canvas.text((turn + _RIGHT) / 2, 42, "backward", anchor="middle")
    for row, unit in enumerate(units):
        top = 52 + _ROW * row
        canvas.text(_LEFT - 8, top + 11, _short(unit), anchor="end")
        canvas.box(_RULE, _LEFT, top + 23, _RIGHT - _LEFT, 0)
        unit_events = [(i, each.kind) for i, each in enumerate(events) if each.unit == unit]
        for first, last, color in _bars(unit_events, len(events)):
            y, height = (top + 13, 8) if color == _GRADS else (top, 12)
            canvas.box(color, at[first], y, at[last] - at[first], height)
            if unit == units[2]:
                _name_bar(canvas, color, at[first], at[last], top)
        for i in (i for i, kind in unit_events if kind in _WIDE):
            canvas.box(_OUTLINE, at[i], top, at[i + 1] - at[i], 12)
            canvas.text((at[i] + at[i + 1]) / 2, top + 9.5, "run", anchor="middle", size=9)


def _name_bar(canvas: _Canvas, color: str, left: float, right: float, top: float) -> None:
    if color == _ARRIVING:
        canvas.text((left + right) / 2, top + 9.5, "gather", anchor="middle", size=9)
    elif color == _WHOLE:
        canvas.text(right + 2, top + 9.5, "free", size=9)
    else:
        canvas.text((left + right) / 2, top + 20, "reduce", anchor="middle", size=9)


def _bars(unit_events: Sequence[tuple[int, EventKind]], end: int) -> Iterator[tuple[int, int, str]]:
    """Yield the first event, the last event and the color of each bar of a unit."""
    began: dict[str, int] = {}
    last_reduced = max((i for i, kind in unit_events if kind is K.REDUCED), default=end)
    for i, kind in unit_events:
        if kind is K.GATHER:
            began[_ARRIVING] = i
        elif kind is K.READY:
            if _ARRIVING in began:  # otherwise the unit is still in its unshard buffer
                yield began.pop(_ARRIVING), i, _ARRIVING
            began[_WHOLE] = i
        elif kind is K.FREE:
            yield began.pop(_WHOLE), i + 1, _WHOLE
        elif kind is K.REDUCE:
            began.setdefault(_GRADS, i)
        elif i == last_reduced:
            yield began.pop(_GRADS), i + 1, _GRADS


def _draw_moments(
    canvas: _Canvas, step: StepPlan, events: Sequence[Event], units: Sequence[str], top: float
) -> None:
    title = "What four ranks hold: parameters (top), gradients (middle), optimizer states (bottom)"
    canvas.text(16, top, title, bold=True)
    unit = units[2]
    moments = {
        "between steps": 0,
        f"forward of {_short(unit)}": events.index(Event(K.FORWARD, unit)) + 1,
        f"backward of {_short(unit)}": events.index(Event(K.BACKWARD, unit)) + 1,
        "optimizer step": len(events),
    }
    panel = (_WIDTH - 70) / len(moments)
    cell = (panel - 14) / len(units)
    for column, (title, moment) in enumerate(moments.items()):
        left = 62 + panel * column
        canvas.text(left, top + 24, title)
        for number, name in enumerate(units):
            x = left + cell * number
            canvas.text(
                x + cell / 2 - 2,
                top + 37,
                _short(name).removeprefix("block ").replace("embedding", "emb."),
                anchor="middle",
                size=8,
            )
            for rank in range(NUM_RANKS):
                past = [each.kind for each in events[:moment] if each.unit == name]
                _draw_held(canvas, step, name, rank, past, (x, top + 42 + 44 * rank, cell - 4))
    for rank in range(NUM_RANKS):
        canvas.text(54, top + 64 + 44 * rank, f"rank {rank}", anchor="end")


def _draw_held(
    canvas: _Canvas, step: StepPlan, unit: str, rank: int, past: Sequence[EventKind],
    at: tuple[float, float, float],
) -> None:  # fmt: skip
    """Draw what a rank holds of a unit after the events `past`; `at` is left, top and width."""
    x, y, width = at
    (layout,) = step.layouts[unit]
    part = layout.owned_spans[rank]
    first, share = x + width * part.start / layout.numel, width * part.numel / layout.numel
    last = {kind: i for i, kind in enumerate(past)}
    gathered, ready, freed = (last.get(kind, -1) for kind in (K.GATHER, K.READY, K.FREE))
    if ready > freed:
        canvas.box(_WHOLE, x, y, width, 11)
    elif gathered > ready:
        canvas.box(_ARRIVING, x, y, width, 11)
    canvas.box(_SHARD, first, y, share, 11)
    if K.REDUCED in last:
        canvas.box(_GRADS, first, y + 12, share, 11)
    elif K.BACKWARD in last or K.REDUCE in last:
        canvas.box(_GRADS, x, y + 12, width, 11)
    canvas.box(_STATES, first, y + 24, share, 11)
    canvas.box(_OUTLINE, x, y, width, 35)


def _short(unit: str) -> str:
    name = unit.removeprefix("model.").replace("embed_tokens", "embedding")
    return name.replace("layers.", "block ").removeprefix("lm_")
