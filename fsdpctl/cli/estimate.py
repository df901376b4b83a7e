"""`fsdpctl estimate-memory`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fsdpctl.cli.config_args import ConfigArguments, composed_from, configured
from fsdpctl.cli.console import new_table, note, say, show_table
from fsdpctl.cli.from_others import asked_from, show_translation
from fsdpctl.errors import UsageError, nearest
from fsdpctl.plan.strategy import STRATEGIES

if TYPE_CHECKING:
    from fsdpctl.estimate.advice import Change
    from fsdpctl.estimate.candidates import Ranking
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.fit import Fit
    from fsdpctl.estimate.run_estimate import RunEstimate

_DOES_NOT_FIT = 3
_FITTED = ("micro_batch", "seq_len", "model")
_LARGE_BUFFERS = 0.25  # of a device, from which plain sharding of experts is hard to justify
_VERDICTS = {
    "fits": "fits",
    "thrashes": "fits only if the allocator repeatedly empties its cache, which is slow",
    "too_large": "does not fit",
}
_SHORT_VERDICTS = {"too_large": _VERDICTS["too_large"]}


@configured
def estimate_memory(
    asked: ConfigArguments,
    all_strategies: Annotated[
        bool, typer.Option("--all-strategies", help="Estimate all strategies, one line each.")
    ] = False,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_FITTED),
            help="Find the largest micro-batch, sequence length or number of blocks that fits.",
        ),
    ] = None,
    require_fit: Annotated[
        bool,
        typer.Option("--require-fit", help="Exit with code 3 if the configuration does not fit."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory to write charts to.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Configuration file of axolotl or accelerate to import.",
        ),
    ] = None,
) -> None:
    """Estimate peak memory per rank before a run.

    Takes the settings of `train`, for hardware that need not exist: `cluster=h100 launch.nnodes=4`.
    `auto` is resolved for `cluster`. `cluster.memory=80GiB` sets the memory of a rank.
    """
    if fit is not None and fit not in _FITTED:
        expected = ", ".join(_FITTED)
        raise UsageError(f"--fit {fit}: expected {expected}{nearest(fit, _FITTED)}")
    others = None if source is None else asked_from(source, asked)
    composed = others.composed if others else composed_from(asked, quiet=as_json)
    from fsdpctl.estimate.estimator import Estimator
    from fsdpctl.estimate.search import estimates_of
    from fsdpctl.start.begin import describe_ranking

    estimator = Estimator()
    found = estimates_of(estimator, composed.config, every=all_strategies)
    estimates = [each for each, _ in found]
    fits = _fits(estimator, estimates, fit)
    if plot is not None:
        _draw(estimates, fits, plot)
    if others is not None and not as_json:
        show_translation(others)
    if as_json:
        entries = _entries(found, fits)
        if others is not None:
            entries = [{**entry, "from": others.to_dict()} for entry in entries]
        say(json.dumps(entries if all_strategies else entries[0], indent=2))
    elif all_strategies:
        _show_all(estimates, fits)
        for each, ranking in found:
            if ranking is not None:
                say(f"{each.config.strategy.name}: {next(describe_ranking(ranking))}")
    else:
        ranking = found[0][1]
        for line in [] if ranking is None else describe_ranking(ranking):
            say(line)
        _show_one(estimator, estimates[0], fits)
    if require_fit and not any(
        each.verdict == "fits" and not each.lacks_host_memory for each in estimates
    ):
        raise typer.Exit(_DOES_NOT_FIT)


def _fits(estimator: "Estimator", estimates: list["RunEstimate"], fit: str | None) -> list["Fit"]:
    """Return the largest size that fits for each estimate, if requested."""
    if fit is None:
        return []
    from fsdpctl.estimate.fit import largest_that_fits

    return [largest_that_fits(estimator, each.config, fit) for each in estimates]


def _entries(
    found: "list[tuple[RunEstimate, Ranking | None]]", fits: "list[Fit]"
) -> list[dict[str, Any]]:
    """Return the objects that `--json` prints."""
    entries = [
        {**estimate.to_dict(), **({} if ranking is None else {"selected": ranking.to_dict()})}
        for estimate, ranking in found
    ]
    for entry, largest in zip(entries, fits, strict=False):
        entry["fit"] = largest.to_dict()
    return entries


def _draw(estimates: list["RunEstimate"], fits: list["Fit"], folder: Path) -> None:
    from fsdpctl.tools.drawing import draw_estimates, draw_largest

    fitted = [each.estimate for each in fits if each.estimate]
    drawn = [*draw_estimates(estimates, folder), *draw_estimates(fitted, folder, "fit")]
    for path in drawn:
        note(f"written: {path}")
    if len(fits) > 1 and any(each.estimate for each in fits):
        names = [each.config.strategy.name for each in estimates]
        note(f"written: {draw_largest(fits, names, folder)}")


def _show_all(estimates: list["RunEstimate"], fits: list["Fit"]) -> None:
    for line in _heading(estimates[0]):
        say(line)
    show_table(_strategies_table(estimates))
    shown = {each.config.strategy.name for each in estimates}
    if missing := [name for name in STRATEGIES if name not in shown]:
        say(f"engine={estimates[0].config.engine.name} does not support {', '.join(missing)}")
    for each, fit in zip(estimates, fits, strict=False):
        say(f"{each.config.strategy.name}: {_fit_line(fit)}")


def _show_one(estimator: "Estimator", found: "RunEstimate", fits: list["Fit"]) -> None:
    for line in _heading(found):
        say(line)
    show_table(_breakdown_table(found))
    say()
    for line in _conclusions(found):
        say(line)
    if fits:
        say(f"fit     {_fit_line(fits[0])}")
    nothing_fits = fits[0].estimate is None if fits else found.verdict != "fits"
    if nothing_fits:
        from fsdpctl.estimate.advice import advice

        changes = advice(estimator, found.config)
        for line in change_lines(changes):
            say(line)
        for line in _fits_with(estimator, changes, fits):
            say(line)


def _fits_with(
    estimator: "Estimator", changes: list[tuple["Change", "RunEstimate"]], fits: list["Fit"]
) -> Iterator[str]:
    """Yield the largest size that fits with each change, if nothing fits without."""
    from fsdpctl.estimate.fit import FITTED, largest_that_fits

    for fit in fits:
        (what,) = (name for name, key in FITTED.items() if key == fit.key)
        for change, _ in changes:
            if not any(word.startswith(f"{fit.key}=") for word in change.words):
                found = largest_that_fits(estimator, change.config, what)
                yield f"fit     {_fit_line(found)}, with {' '.join(change.words)}"


def _heading(first: "RunEstimate") -> list[str]:
    from fsdpctl.resolve.machine import world_size

    config, launch, precision = first.config, first.config.launch, first.config.precision
    nodes = "" if launch.nnodes == 1 else f" on {launch.nnodes} nodes"
    batches, prefetch = first.batches, config.prefetch
    shared = config.train.context_parallel
    who = "rank" if shared == 1 else f"group of {shared} ranks"
    recomputes = config.activation_checkpointing.name
    recomputes += ", inputs in host memory" if config.activation_checkpointing.offload else ""
    compiled = "; estimated without torch.compile" if config.train.compile else ""
    base = "" if config.model.base_dtype is None else f", {config.model.base_dtype} linear layers"
    return [
        f"model   {config.model.name}, {first.num_params:,} parameters{_trained(first)}",
        f"ranks   {world_size(config)} on {launch.device}{nodes}, {_size(first.memory_bytes)} each "
        f"(cluster={config.cluster.name}), engine {config.engine.name}",
        f"dtypes  {precision.param_dtype} compute, {precision.reduce_dtype} reduction, "
        f"{precision.master_dtype} master weights{base}",
        f"step    {first.tokens_per_step:,} tokens: each {who} {batches.num_micro_batches} x "
        f"{batches.micro_batch_size} samples of {config.train.seq_len}; accumulation "
        f"{config.accumulation.name}; activation checkpointing {recomputes}{compiled}; prefetch "
        f"{prefetch.forward} forward, {prefetch.backward} backward",
        "",
    ]


def _trained(estimate: "RunEstimate") -> str:
    active, trained = estimate.num_active, estimate.num_trained
    parts = ["" if active == estimate.num_params else f", {active:,} active"]
    return "".join([*parts, "" if trained == estimate.num_params else f", {trained:,} trained"])


def _strategies_table(estimates: list["RunEstimate"]) -> Table:
    """Return the memory at the peak, a row for each strategy."""
    parts = [name for name in estimates[0].step.breakdown if name != "rounding"]
    names = [name.replace("_", " ") for name in [*parts, "allocated", "reserved", "margin"]]
    table = new_table("strategy", *names, "", right=names)
    for each in estimates:
        cells = [_size(each.step.breakdown[name]) for name in parts]
        totals = [_size(each.allocated), _size(each.peak_reserved), _size(each.margin)]
        verdict = _SHORT_VERDICTS.get(each.verdict, each.verdict)
        table.add_row(each.config.strategy.name, *cells, *totals, verdict)
    return table


def _breakdown_table(found: "RunEstimate") -> Table:
    title = f"{found.config.strategy.name}, per rank at the peak"
    table = new_table(title, "", "largest tensors", right=("",))
    for name, nbytes in found.step.breakdown.items():
        largest = [each for each in found.step.peak.largest if each.category == name]
        named = [f"{each.count} x {each.what}, {_size(each.nbytes)}" for each in largest[:2]]
        table.add_row(name.replace("_", " "), _size(nbytes), "; ".join(named))
    table.add_row("allocated", _size(found.allocated), f"peak at: {found.step.peak.when}")
    return table


def _conclusions(found: "RunEstimate") -> list[str]:
    config, outside = found.config, found.outside
    lines = []
    if config.launch.device == "cuda":
        each = [f"{_size(nbytes)} {name}" for name, nbytes in found.step.reserved.items()]
        lines.append(
            f"reserved by the allocator: {', '.join(each)}; launch.allocator="
            f"{config.launch.allocator}"
        )
    buffers = sum(found.step.breakdown[name] for name in ("gathered_units", "reduce_buffers"))
    if found.num_active < found.num_params and buffers > _LARGE_BUFFERS * found.memory_bytes:
        lines.append(
            f"experts {_size(buffers)} of gathered units and reduce buffers do not shrink with "
            "more ranks; expert parallelism would divide them, but fsdpctl does not have it"
        )
    lines += [
        f"outside {_size(outside.low)} to {_size(outside.high)} (assumed): the process"
        + (", its CUDA context, and NCCL" if config.launch.device == "cuda" else ""),
        f"host    about {_size(found.host_bytes)} of memory per worker{_on_node(found)}; a "
        f"checkpoint takes {_size(found.checkpoint_bytes)} of disk",
        f"verdict {_VERDICTS[found.verdict]}: {_size(abs(found.margin))} "
        f"{'to spare' if found.margin >= 0 else 'missing'}",
    ]
    return lines


def _on_node(found: "RunEstimate") -> str:
    if found.host_limit is None:
        return ""
    fits = "does not fit" if found.lacks_host_memory else "fits"
    return f", {_size(found.node_bytes)} of {_size(found.host_limit)} per node ({fits})"


def _fit_line(found: "Fit") -> str:
    if found.estimate is None:
        return f"none: {found.key}=1 does not fit"
    held = _size(found.estimate.peak_reserved)
    if found.key == "model.num_layers":
        held += f", {found.estimate.num_params:,} parameters"
    if found.next is None:
        return f"{found.settings} ({held}), the maximum"
    over = _size(found.next.peak_reserved)
    return f"{found.settings} ({held}); {found.value + found.multiple} does not fit ({over})"


def change_lines(changes: list[tuple["Change", "RunEstimate"]]) -> list[str]:
    """Return lines with the changes that make a configuration fit."""
    if not changes:
        return ["to fit  no change found that makes it fit"]
    lines = [
        f"{' '.join(change.words)}: {_size(estimate.peak_reserved)}; {change.cost}"
        for change, estimate in changes
    ]
    return [f"{'to fit' if not i else '':<8}{line}" for i, line in enumerate(lines)]


def _size(nbytes: int) -> str:
    from fsdpctl.run.progress import format_bytes

    return format_bytes(nbytes) if nbytes >= 0 else f"-{format_bytes(-nbytes)}"
