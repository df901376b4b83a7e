"""Writes the parts of the documentation that are computed from code: `python -m docs.generate`.

Tables replace the text between the markers `<!-- NAME -->` and `<!-- /NAME -->` of the pages. The
picture shows the memory that the plan replays.
"""

from pathlib import Path

import matplotlib
from typer.testing import CliRunner

from docs import measured
from docs.cpu_memory import growth_table, huge_pages_line
from docs.decoders import decoders_table, loading_table
from docs.evidence import evidence_table
from docs.faults import faults_table
from docs.less_memory import compressed_states_table
from docs.predicted import predicted_steps_table, published_steps_table, selections_line
from fsdpctl.cli.app import app
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.describe import divide_module
from fsdpctl.estimate.estimator import Estimator, plan_for_estimate
from fsdpctl.estimate.run_plan import plan_run, sent_in_step
from fsdpctl.estimate.search import estimates_of
from fsdpctl.models.registry import build_model
from fsdpctl.plan.schedule import EventKind
from fsdpctl.plan.sizes import RankPlace
from fsdpctl.plan.strategy import STRATEGIES, Strategy
from fsdpctl.predict.engine_bytes import Breakdown, PlannedMemory, estimate, timeline
from fsdpctl.predict.training_plan import TrainingPlan
from fsdpctl.resolve.machine import world_size

DOCS = Path(__file__).parent
PAGES = tuple(
    DOCS / f"{name}.md"
    for name in (
        "strategies",
        "performance",
        "memory-model",
        "reliability",
        "clusters",
        "time-model",
        "auto",
        "models",
        "fine-tune",
        "less-memory",
        "evidence",
        "long-runs",
    )
)
PICTURE = DOCS / "strategies.png"
RECIPES = tuple(sorted((DOCS.parent / "recipes").glob("*.yaml")))
ESTIMATED = "# Estimated:"
MODEL = ["model=llama3_8b", "cluster=h100", "launch.nproc_per_node=4", "launch.nnodes=2"]
REPLICAS_RECIPE = DOCS.parent / "recipes" / "llama3_70b_64xh100.yaml"
REPLICAS = (
    ["strategy=full_shard"],
    ["strategy=hybrid_shard", "strategy.dp_shard_size=8"],
    ["strategy=hybrid_shard", "strategy.dp_shard_size=32"],
    ["strategy=hybrid_shard_optimizer", "strategy.dp_shard_size=8"],
)
GIB = 1 << 30
VERDICTS = {"fits": "fits", "thrashes": "thrashes", "too_large": "does not fit"}
COLORS = {
    "parameters": "#4269d0",
    "optimizer_states": "#6cc5b0",
    "gradients": "#efb118",
    "gathered_units": "#a6bce8",
    "reduce_buffers": "#ff725c",
}


def strategy_table() -> str:
    """Return the table of strategies in Markdown, one row each."""
    rows = [
        "| `strategy=` | known as | parameters between steps | after a unit's forward | reduced "
        "gradients | optimizer states | after the step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in STRATEGIES.items():
        cells = (f"`{name}`", row.known_as, *_cells(row))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cells(row: Strategy) -> tuple[str, ...]:
    part = "own part" if row.has_owner_map else "shard"
    within = " within `dp_shard_size` ranks" if row.replicates else ""
    over = ", summed over replicas" if row.replicates else ""
    if row.shards_over_copies:
        within, part, over = f"{within}, compute dtype", "shard over all ranks", ""
    if not row.shards_params:
        after = "full"
    else:
        after = "freed" if row.reshard_after_forward else "kept until the unit's backward ends"
    renewed = "new values sent to all replicas" if row.shards_over_copies else "parameters gathered"
    return (
        "full" if not row.shards_params else f"shard{within}",
        after,
        f"{part}{over}" if row.shards_grads else "full",
        part if row.shards_optimizer else "full",
        renewed if row.renews_params else "–",
    )


def memory_table() -> str:
    """Return the peak memory of the fullest rank for the model in the picture, in GiB."""
    rows = [
        "| `strategy=` | parameters | optimizer states | gradients | gathered units | reduce "
        "buffers | all at once |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in STRATEGIES:
        found = estimate(*planned(name))
        largest = found.largest.to_dict()
        sizes = [largest[each] for each in COLORS] + [found.peak_bytes]
        cells = " | ".join(f"{size / GIB:.1f}" for size in sizes)
        rows.append(f"| `{name}` | {cells} |")
    return "\n".join(rows)


def replicas_table() -> str:
    """Return a recipe's memory and traffic under strategies with replicas."""
    header = [
        "`strategy=`",
        "`dp_shard_size`",
        "reserved",
        "verdict",
        "sent within a replica",
        "sent across replicas",
    ]
    rows = [header, ["---"] * len(header)]
    estimator = Estimator()
    for settings in REPLICAS:
        composed = compose_config(["launch.device=cuda", *settings], str(REPLICAS_RECIPE))
        found = estimator.estimate(plan_for_estimate(composed))
        placed = found.config
        sent = sent_in_step(placed, divide_module(build_model(placed.model), None), 1)
        found_bytes = found.peak_reserved, sent.within, sent.between
        cells = [f"{each / GIB:.1f} GiB" for each in found_bytes]
        size = str(placed.strategy.dp_shard_size or world_size(placed))
        name = f"`{placed.strategy.name}`"
        rows.append([name, size, cells[0], VERDICTS[found.verdict], *cells[1:]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def estimate_output() -> str:
    """Return the output of `fsdpctl estimate-memory` as a code block."""
    arguments = ["estimate-memory", "model=llama3_8b", "cluster=h100", "train.seq_len=4096"]
    arguments += ["--all-strategies"]
    printed = CliRunner().invoke(app, arguments).output
    lines = [f"$ fsdpctl {' '.join(arguments)}", *map(str.rstrip, printed.splitlines())]
    return "\n".join(["```", *lines, "```"])


TABLES = {
    "strategies": strategy_table,
    "memory": memory_table,
    "replicas": replicas_table,
    "estimate": estimate_output,
    "step_time": measured.step_time_table,
    "step_time_beside_ddp": measured.step_time_beside_ddp_table,
    "peak_memory": measured.peak_memory_table,
    "host_time": measured.host_time_table,
    "planning": measured.planning_table,
    "estimate_errors": measured.estimate_errors_table,
    "published_runs": measured.published_runs_table,
    "estimate_time": measured.estimate_time_table,
    "startup": measured.startup_line,
    "growth": growth_table,
    "huge_pages": huge_pages_line,
    "consolidate": measured.consolidate_table,
    "saving": measured.saving_table,
    "evidence": evidence_table,
    "faults": faults_table,
    "decoders": decoders_table,
    "loading": loading_table,
    "base-dtype": measured.base_dtype_table,
    "offload": measured.offload_table,
    "compressed_states": compressed_states_table,
    "slow_links": measured.slow_links_table,
    "published_steps": published_steps_table,
    "predicted_steps": predicted_steps_table,
    "selections": selections_line,
    "surviving": measured.surviving_lines,
}


def filled(page: str) -> str:
    """Return a page with its tables replaced by current ones."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if start in page:
            before, rest = page.split(start, 1)
            page = f"{before}{start}{table()}\n{end}{rest.split(end, 1)[1]}"
    return page


def estimated_recipe(file: Path) -> str:
    """Return a recipe with its estimate in the header, if it is for specified hardware."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith(ESTIMATED)]
    if any(line.startswith("cluster") for line in lines):
        composed = compose_config(["launch.device=cuda"], str(file))
        ((found, _),) = estimates_of(Estimator(), composed, every=False)
        reserved, memory = found.peak_reserved / GIB, found.memory_bytes / GIB
        head = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        verdict = VERDICTS[found.verdict]
        lines.insert(head, f"{ESTIMATED} {reserved:.1f} of {memory:.1f} GiB per rank, {verdict}.")
    return "\n".join(lines) + "\n"


def planned(name: str) -> tuple[TrainingPlan, RankPlace]:
    """Return the training plan of the page's model under a strategy, and its rank."""
    config = plan_for_estimate(compose_config([*MODEL, f"strategy={name}"])).config
    return plan_run(config, divide_module(build_model(config.model), None), 1)


def moments_of(name: str) -> list[Breakdown]:
    """Return a rank's memory at rest, in each unit's forward and backward, and at the end."""
    plan, place = planned(name)
    order = plan.order
    moments = list(timeline(plan, place))
    forward = _held_at(moments, EventKind.READY)
    backward = _held_at(moments, EventKind.REDUCE)
    rest = moments[0].held
    units = (order.root, *order.forward)
    return [
        rest,
        *(forward.get(unit, rest) for unit in units),
        *(backward[unit] for unit in order.reduction),
        moments[-1].held,
    ]


def _held_at(moments: list[PlannedMemory], kind: EventKind) -> dict[str, Breakdown]:
    """Return the memory after the first event of a kind, by unit."""
    found: dict[str, Breakdown] = {}
    for moment in moments:
        if moment.event is not None and moment.event.kind is kind:
            found.setdefault(moment.event.unit, moment.held)
    return found


def draw(file: Path) -> None:
    """Draw one panel per strategy: memory over the moments of a step."""
    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 9})
    from matplotlib import pyplot

    rows = -(-len(STRATEGIES) // 2)
    size = (9, 8 / 3 * rows)
    figure, panels = pyplot.subplots(
        rows, 2, figsize=size, sharex=True, sharey=True, layout="constrained"
    )
    for panel in panels.flat[len(STRATEGIES) :]:
        panel.set_axis_off()
    panels.flat[len(STRATEGIES) - 2].tick_params(labelbottom=True)  # the last of its column
    for panel, name in zip(panels.flat, STRATEGIES, strict=False):
        moments = moments_of(name)
        heights = [[getattr(each, part) / GIB for each in moments] for part in COLORS]
        labels = [part.replace("_", " ") for part in COLORS]
        panel.stackplot(
            range(len(moments)), heights, labels=labels, colors=list(COLORS.values()), step="mid"
        )
        middle = len(moments) / 2 - 0.5
        panel.axvline(middle, color="black", linewidth=0.6, linestyle=":")
        panel.set_xlim(0, len(moments) - 1)
        panel.set_xticks([middle / 2, middle * 1.5], ["forward", "backward"])
        panel.tick_params(axis="x", length=0)
        panel.set_title(f"{name} ({STRATEGIES[name].known_as})", fontsize=9)
        panel.set_ylabel("GiB per rank")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Rewrite the pages, the recipes' headers and the picture."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    for recipe in RECIPES:
        recipe.write_text(estimated_recipe(recipe))
    draw(PICTURE)


if __name__ == "__main__":
    main()
