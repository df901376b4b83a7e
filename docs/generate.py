"""Writes the parts of the documentation that are computed from code: `python -m docs.generate`.

Tables replace the text between the markers `<!-- NAME -->` and `<!-- /NAME -->` of the pages. The
pictures show the units and the memory of a step by its plan, and a simulated comparison.
"""

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path

import matplotlib
from PIL import Image
from typer.testing import CliRunner

from docs import evidence, measured
from docs.how_it_works import draw_how_it_works
from docs.rooms import rooms_picture
from docs.savings import savings_of_activations, savings_of_states
from docs.settings import settings_tables
from fsdpctl.commands.app import app
from fsdpctl.commands.compare.report import draw_rows, sorted_rows
from fsdpctl.commands.compare.results import predict
from fsdpctl.commands.compare.variants import variants_of
from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.planned_steps import plan_training, sent_per_step
from fsdpctl.estimate.resolve_auto import estimates_of
from fsdpctl.models.build_model import build_model
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.strategy import STRATEGIES, Strategy
from fsdpctl.predict.engine_bytes import engine_peak, timeline
from fsdpctl.predict.step_recorder import Category
from fsdpctl.predict.training_plan import TrainingPlan
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan

DOCS = Path(__file__).parent
PAGES = tuple(
    page
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("**/*.md")))
    if "<!-- /" in page.read_text()
)
PICTURE = DOCS / "strategies.png"
SIMULATION = DOCS / "simulated.svg"
UNITS = DOCS / "how-it-works.svg"
CLUSTERS = "cluster=8xrtx4090,8xa100_80,8xh100,8xh200,8xb200"
SIMULATED = ["model=llama3_8b", CLUSTERS, "train.tokens=10e9"]
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
    Category.PARAMETERS: "#4269d0",
    Category.OPTIMIZER_STATES: "#6cc5b0",
    Category.GRADIENTS: "#efb118",
    Category.GATHERED_UNITS: "#a6bce8",
    Category.REDUCE_BUFFERS: "#ff725c",
}


def strategy_table() -> str:
    """Return the table of strategies in Markdown, one row each."""
    header = (
        "`strategy=` | known as | parameters between steps | after a unit's forward | reduced "
        "gradients | optimizer states | after the step"
    )
    rows = (
        " | ".join((f"`{row.name}`", row.known_as, *_cells(row))) for row in STRATEGIES.values()
    )
    return measured.table_of(header, rows, align="---")


def _cells(row: Strategy) -> tuple[str, ...]:
    part = "own part" if row.has_owner_map else "shard"
    within = " within `dp_shard_size` ranks" if row.replicates else ""
    over = ", summed over replicas" if row.replicates else ""
    if row.shards_over_replicas:
        within, part, over = f"{within}, compute dtype", "shard over all ranks", ""
    if not row.shards_params:
        after = "full"
    else:
        after = "freed" if row.reshard_after_forward else "kept until the unit's backward ends"
    updated = (
        "new values sent to all replicas" if row.shards_over_replicas else "parameters gathered"
    )
    return (
        "full" if not row.shards_params else f"shard{within}",
        after,
        f"{part}{over}" if row.shards_grads else "full",
        part if row.shards_optimizer else "full",
        updated if row.syncs_params else "–",
    )


def memory_table() -> str:
    """Return the peak memory of the fullest rank for the model in the picture, in GiB."""
    header = " | ".join(["`strategy=`", *COLORS, "all at once"]).replace("_", " ")
    rows = []
    for name in STRATEGIES:
        result = engine_peak(planned(name))
        largest = result.largest
        sizes = [largest[each] for each in COLORS] + [result.peak_bytes]
        rows.append(" | ".join([f"`{name}`", *(f"{size / GIB:.1f}" for size in sizes)]))
    return measured.table_of(header, rows, align="---")


def replicas_table() -> str:
    """Return a recipe's memory and traffic under strategies with replicas."""
    header = (
        "`strategy=` | `dp_shard_size` | reserved | verdict | sent within a replica | sent across "
        "replicas"
    )
    rows = []
    estimator = Estimator()
    for settings in REPLICAS:
        composed = compose_config(["launch.device=cuda", *settings], str(REPLICAS_RECIPE))
        result = estimator.estimate(make_run_plan(prepare(composed, ESTIMATE_ROLE).config))
        placed = result.config
        sent = sent_per_step(placed, module_units(build_model(placed.model), None), 1)
        count = placed.strategy.dp_shard_size or placed.num_ranks
        gib = (result.peak_reserved / GIB, sent.intra_replica / GIB, sent.inter_replica / GIB)
        reserved, within, between = (f"{each:.1f} GiB" for each in gib)
        rows.append(
            f"`{placed.strategy.name}` | {count} | {reserved} | {VERDICTS[result.verdict]} | "
            f"{within} | {between}"
        )
    return measured.table_of(header, rows, align="---")


def estimate_output() -> str:
    """Return the output of `fsdpctl estimate-memory` as a code block."""
    arguments = ["estimate-memory", "model=llama3_8b", "cluster=h100", "train.seq_len=4096"]
    arguments += ["--all-strategies"]
    printed = CliRunner().invoke(app, arguments).output
    lines = [f"$ fsdpctl {' '.join(arguments)}", *map(str.rstrip, printed.splitlines())]
    return "\n".join(["```", *lines, "```"])


TABLES: dict[str, Callable[[], str] | str] = {
    "rooms": rooms_picture,
    "strategies": strategy_table,
    "memory": memory_table,
    "replicas": replicas_table,
    "estimate": estimate_output,
    "settings": settings_tables,
    "savings of activations": savings_of_activations,
    "savings of states": savings_of_states,
    "step_time": measured.step_time_table,
    "step_time_beside_ddp": measured.step_time_beside_ddp_table,
    "step_time_of_shared_memory": measured.step_time_of_shared_memory_table,
    "peak_memory": measured.peak_memory_table,
    "host_time": measured.host_time_table,
    "host_time_of_pieces": partial(measured.host_time_table, "host-time-pieces"),
    "estimate_errors": measured.estimate_errors_table,
    "published_runs": measured.published_runs_table,
    "published_steps": measured.published_steps_table,
    "registered": measured.registered_table,
    "estimate_time": measured.estimate_time_table,
    "startup": measured.startup_line,
    "growth": measured.growth_table,
    "compressed_states": measured.compressed_states_table,
    "faults": evidence.faults_table,
    "decoders": evidence.decoders_table,
}


def filled(page: str) -> str:
    """Return a page with its tables, and phrases within lines, replaced by current ones."""
    for name, table in (TABLES | evidence.phrases()).items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if start in page:
            before, rest = page.split(start, 1)
            old, after = rest.split(end, 1)
            text = table if isinstance(table, str) else table()
            edge = "\n" if old.startswith("\n") else ""
            page = f"{before}{start}{edge}{text}{edge}{end}{after}"
    return page


def estimated_recipe(file: Path) -> str:
    """Return a recipe with its estimate in the header, if it is for specified hardware."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith(ESTIMATED)]
    if any(line.startswith("cluster") for line in lines):
        composed = compose_config(["launch.device=cuda"], str(file))
        ((result, _),) = estimates_of(Estimator(), composed, all_strategies=False)
        reserved, memory = result.peak_reserved / GIB, result.memory_bytes / GIB
        head = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        verdict = VERDICTS[result.verdict]
        lines.insert(head, f"{ESTIMATED} {reserved:.1f} of {memory:.1f} GiB per rank, {verdict}.")
    return "\n".join(lines) + "\n"


def planned(name: str) -> TrainingPlan:
    """Return the training plan of the page's model under a strategy."""
    config = make_run_plan(
        prepare(compose_config([*MODEL, f"strategy={name}"]), ESTIMATE_ROLE).config
    ).config
    return plan_training(config, module_units(build_model(config.model), None), 1)


def draw(file: Path) -> None:
    """Draw one panel per strategy: a rank's memory after each event of a step."""
    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 9})
    from matplotlib import pyplot

    rows = -(-len(STRATEGIES) // 2)
    figure, panels = pyplot.subplots(rows, 2, figsize=(9, 8 / 3 * rows), layout="constrained")
    for panel, name in zip_longest(panels.flat, STRATEGIES):
        if name is None:
            panel.set_axis_off()
        else:
            moments = timeline(planned(name))
            heights = [[held[part] / GIB for held in moments] for part in COLORS]
            labels = [part.replace("_", " ") for part in COLORS]
            colors = list(COLORS.values())
            panel.stackplot(range(len(moments)), heights, labels=labels, colors=colors, step="mid")
            panel.margins(x=0)
            panel.set_xticks([])
            panel.set_title(f"{name} ({STRATEGIES[name].known_as})", fontsize=9)
            panel.set_ylabel("GiB per rank")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
    Image.open(file).quantize(64).save(file, optimize=True)


def draw_simulation(file: Path) -> None:
    """Draw the time of a run on several clusters, as `fsdpctl compare --simulate` does."""
    # Text stays text in an SVG file, with one name of a font instead of thirteen.
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]})
    matplotlib.rcParams.update({"svg.hashsalt": "fsdpctl", "font.size": 9})
    result = variants_of(SIMULATED, None, simulates=True)
    list(predict(result))
    title = "Llama 3 8B on 10 billion tokens, predicted with the error band"
    figure = draw_rows(sorted_rows([each.result for each in result]), title, "time")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Rewrite the pages, the recipes' headers and the pictures."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    for recipe in RECIPES:
        recipe.write_text(estimated_recipe(recipe))
    draw(PICTURE)
    draw_simulation(SIMULATION)
    draw_how_it_works(UNITS)


if __name__ == "__main__":
    main()
