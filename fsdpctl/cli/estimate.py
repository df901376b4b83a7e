"""`fsdpctl estimate-memory`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fsdpctl.cli.console import say, show_table
from fsdpctl.cli.words import ConfigDir, Recipe, Words, composed_from

if TYPE_CHECKING:
    from fsdpctl.train.footprint import RunEstimate

_NOT_COUNTED = "activations, and gradients that are not collected yet, are not counted"


def estimate_memory(
    words: Words = None,
    recipe: Recipe = None,
    config_dir: ConfigDir = None,
    all_strategies: Annotated[
        bool, typer.Option("--all-strategies", help="One line for each strategy.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what each rank will hold in memory.

    Of model, optimizer and buffers, for the same settings as `train`. `auto` is resolved against
    `cluster`: `cluster=h100 launch.nnodes=4`.
    """
    composed = composed_from(words, recipe, config_dir, quiet=as_json)
    from fsdpctl.train.footprint import estimate_strategies

    estimates = estimate_strategies(composed.config, every=all_strategies)
    if as_json:
        found = [each.to_dict() for each in estimates]
        say(json.dumps(found if all_strategies else found[0], indent=2))
        return
    for line in _heading(estimates[0]):
        say(line)
    show_table(_table(estimates))
    if not all_strategies:
        say(f"at once: when {estimates[0].estimate.when}")
    say(_verdict(estimates))


def _heading(first: "RunEstimate") -> list[str]:
    from fsdpctl.train.machine import world_size
    from fsdpctl.train.progress import format_bytes

    config, launch, precision = first.config, first.config.launch, first.config.precision
    nodes = "" if launch.nnodes == 1 else f" on {launch.nnodes} nodes"
    memory, prefetch = format_bytes(first.memory_bytes), config.prefetch
    return [
        f"model   {config.model.name}, {first.num_params:,} parameters",
        f"ranks   {world_size(config)} on {launch.device}{nodes}, {memory} each "
        f"(cluster={config.cluster.name})",
        f"dtypes  {precision.param_dtype} compute, {precision.reduce_dtype} reduction, "
        f"{precision.master_dtype} masters",
        f"step    prefetch {prefetch.forward} forward, {prefetch.backward} backward; "
        f"accumulation {config.accumulation.name}",
        "",
    ]


def _table(estimates: list["RunEstimate"]) -> Table:
    """The most of each category, and of all together, on the rank that needs most."""
    from fsdpctl.train.progress import format_bytes

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy")
    for name in [*estimates[0].estimate.largest.to_dict(), "at once"]:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("")
    for each in estimates:
        cells = map(format_bytes, each.estimate.largest.to_dict().values())
        total = format_bytes(each.estimate.peak_bytes)
        mark = "too large" if each.verdict else ""
        table.add_row(each.config.strategy.name, *cells, total, mark)
    return table


def _verdict(estimates: list["RunEstimate"]) -> str:
    if all(each.verdict for each in estimates):
        return f"too large already: {_NOT_COUNTED}"
    return f"exact as far as it goes: {_NOT_COUNTED}"
