"""The lines and tables of `fsdpctl estimate-memory`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from fsdpctl.commands.printing import say, show_table
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.candidates import is_distinct_on_cluster
from fsdpctl.estimate.duration import has_length, notes_on_price, run_length, run_time
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.imported_config import ImportedConfig
from fsdpctl.estimate.largest import LargestFit
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.suggestions import suggest
from fsdpctl.estimate.summary import describe_suggestions, note_on_local_cpu
from fsdpctl.io.texts import format_bytes, three_digits
from fsdpctl.plan.strategy import STRATEGIES, engine_strategies

_WITHOUT_COLUMN = ("rounding", "workspaces")  # categories with few bytes
_VERDICTS = {
    "fits": "fits",
    "thrashes": "fits only if the allocator repeatedly empties its cache, which is slow",
    "too_large": "does not fit",
}


def show_all(
    estimator: Estimator, config: Config, estimates: list[RunEstimate], largest: list[LargestFit]
) -> None:
    """Print a table of the strategies, and notes on the strategies that it lacks."""
    _show_strategies(estimator, estimates)
    say(*notes_on_price(config) if has_length(config) else ())
    shown = {each.config.strategy.name for each in estimates}
    engine = config.engine.name
    strategies = engine_strategies(engine)
    if missing := [name for name in STRATEGIES if name not in strategies]:
        say(f"engine={engine} does not support {', '.join(missing)}")
    if duplicates := [name for name in strategies if not is_distinct_on_cluster(config, name)]:
        say(f"on one node, {', '.join(duplicates)} are the same as strategies above")
    if refused := [name for name in strategies if name not in {*shown, *duplicates}]:
        say(f"other settings exclude {', '.join(refused)}; strategy={refused[0]} shows why")
    for each, fit in zip(estimates, largest, strict=False):
        say(f"{each.config.strategy.name}: {fit_line(fit)}")


def show_one(estimator: Estimator, estimate: RunEstimate, largest: list[LargestFit]) -> None:
    """Print an estimate; if nothing fits, with suggestions."""
    say(*heading([estimate]))
    _show_breakdown(estimate)
    say("", *conclusions(estimate), *_time_lines(estimator, estimate))
    if largest:
        say(f"fit     {fit_line(largest[0])}")
    nothing_fits = largest[0].estimate is None if largest else not estimate.fits
    if nothing_fits:
        say(*note_on_local_cpu(estimate), *describe_suggestions(suggest(estimator, estimate.plan)))


def _time_lines(estimator: Estimator, estimate: RunEstimate) -> Iterator[str]:
    """Yield lines about the time of a run that fits; on a CPU only if a length is set."""
    if estimate.verdict == "too_large":
        return
    try:
        yield from run_time(estimator, estimate).lines()
    except UsageError as error:
        if has_length(estimate.config):
            tokens = estimate.tokens_per_step
            yield f"time    {error}"
            yield run_length(estimate.config, tokens, estimator).line(tokens)


def time_dict(estimator: Estimator, estimate: RunEstimate) -> dict[str, Any]:
    """Return the time of a run for JSON; empty if it cannot be predicted."""
    with suppress(UsageError):
        return run_time(estimator, estimate).to_dict()
    return {}


def heading(estimates: Sequence[RunEstimate]) -> list[str]:
    """Return lines about the model, ranks, dtypes and step that all estimates share."""
    first = estimates[0]
    config, launch, precision = first.config, first.config.launch, first.config.precision
    nodes = "" if launch.nnodes == 1 else f" on {launch.nnodes} nodes"
    size = config.train.context_parallel
    owner = "rank runs" if size == 1 else f"group of {size} ranks runs"
    texts = zip(*map(_selected_texts, estimates), strict=True)
    batches, prefetches, recomputations = (" or ".join(dict.fromkeys(each)) for each in texts)
    products = " with TF32 products" * config.uses_tf32
    compiled = "; estimated without torch.compile" if config.train.compile else ""
    base = "" if config.model.base_dtype is None else f", {config.model.base_dtype} linear layers"
    samples, requested = first.batches.global_batch_size, config.train.global_batch_size
    raised = ""
    if samples > requested:
        raised = f" (assumes train.global_batch_size={samples}, not {requested})"
    return [
        f"model   {config.model.title}, {first.num_params:,} parameters{_trained(first)}",
        f"ranks   {config.num_ranks} on {launch.device}{nodes}, "
        f"{format_bytes(first.memory_bytes)} each (cluster={config.cluster.name}), "
        f"engine {config.engine.name}",
        f"dtypes  {precision.param_dtype} compute{products}, {precision.reduce_dtype} reduction, "
        f"{precision.master_dtype} master weights{base}",
        f"step    {first.tokens_per_step:,} tokens{raised}: each {owner} {batches} samples of "
        f"{config.train.seq_len} tokens; accumulation {config.accumulation.name}; "
        f"activation checkpointing {recomputations}{compiled}; prefetch {prefetches}",
        "",
    ]


def _selected_texts(estimate: RunEstimate) -> tuple[str, str, str]:
    batches, prefetch = estimate.batches, estimate.config.prefetch
    return (
        f"{batches.num_micro_batches} x {batches.micro_batch_size}",
        f"{prefetch.forward} forward, {prefetch.backward} backward",
        estimate.config.activation_checkpointing.title,
    )


def _trained(estimate: RunEstimate) -> str:
    counts = {"active": estimate.num_active, "trained": estimate.num_trained}
    return "".join(f", {n:,} {kind}" for kind, n in counts.items() if n != estimate.num_params)


def _show_strategies(estimator: Estimator, estimates: list[RunEstimate]) -> None:
    breakdowns = [each.step.breakdown for each in estimates]
    names = [name for name in breakdowns[0] if name not in _WITHOUT_COLUMN]
    parts = [name for name in names if any(each[name] for each in breakdowns)]
    time_columns = {"step_seconds": "s/step"}
    if has_length(estimates[0].config):
        time_columns = {"hours": "hours", "cost": "cost"}
    rows = []
    for each in estimates:
        cells = [format_bytes(each.step.breakdown[name]) for name in parts]
        times = map(time_dict(estimator, each).get, time_columns)
        cells += ["-" if x is None else three_digits(x) for x in times]
        reserved = format_bytes(each.peak_reserved)
        rows.append((each.config.strategy.name, verdict(each), *cells, reserved))
    columns = [*(name.replace("_", " ") for name in parts), *time_columns.values(), "reserved"]
    show_table(("strategy", "verdict", *columns), rows, right=columns)


def verdict(estimate: RunEstimate) -> str:
    """Return the verdict for a table or a line: `fits`, `thrashes` or `does not fit`."""
    return estimate.verdict if estimate.verdict != "too_large" else _VERDICTS[estimate.verdict]


def _show_breakdown(estimate: RunEstimate) -> None:
    rows = []
    for name, nbytes in estimate.step.breakdown.items():
        largest = [x for x in estimate.step.peak.largest if x.category == name][:2]
        tensors = [f"{x.count} x {x.description}, {format_bytes(x.nbytes)}" for x in largest]
        rows.append((name.replace("_", " "), format_bytes(nbytes), "; ".join(tensors)))
    phase = f"peak at: {estimate.step.peak.phase}"
    rows.append(("allocated", format_bytes(estimate.allocated), phase))
    title = f"{estimate.config.strategy.name}, per rank at the peak"
    show_table((title, "", "largest tensors"), rows, right=("",))


def conclusions(estimate: RunEstimate) -> list[str]:
    """Return lines about memory outside the peak; the last line is the verdict."""
    config, outside = estimate.config, estimate.outside_allocator
    device_margin = estimate.available - estimate.peak_reserved
    is_of_host = estimate.margin < device_margin
    lines = []
    if config.launch.device == "cuda":
        each = [f"{format_bytes(nbytes)} {name}" for name, nbytes in estimate.step.reserved.items()]
        lines.append(
            f"reserved by the allocator: {', '.join(each)}; launch.allocator="
            f"{config.launch.allocator}, model.init="
            f"{'pretrained' if config.model.is_pretrained else 'random'}"
        )
    if estimate.shared_bytes:
        lines.append(
            f"shared  {format_bytes(estimate.shared_bytes)}, once for all ranks; each rank counts "
            "its share; the resident memory of each process includes all of it"
        )
    lines += [
        f"outside {format_bytes(outside.low)} to {format_bytes(outside.high)} (assumed): the "
        "process" + (", its CUDA context, and NCCL" if config.launch.device == "cuda" else ""),
        f"host    about {format_bytes(estimate.host_bytes)} of memory per worker"
        f"{_on_node(estimate)}; a checkpoint takes "
        f"{format_bytes(estimate.checkpoint_bytes)} of disk",
        f"verdict {_VERDICTS[estimate.verdict]}: {format_bytes(abs(estimate.margin))} "
        f"{'to spare' if estimate.margin >= 0 else 'missing'}"
        f"{' per rank of host memory' * is_of_host}{_headroom(estimate)}",
    ]
    return lines


def _headroom(estimate: RunEstimate) -> str:
    if not estimate.reserve or not estimate.fits:
        return ""
    reserve, percent = format_bytes(estimate.reserve), f"{estimate.reserve_share:.0%}"
    share = f"{reserve}, the {percent} that a selection leaves"
    return f" ({'with' if estimate.leaves_reserve else 'less than'} {share})"


def _on_node(estimate: RunEstimate) -> str:
    if estimate.host_limit is None:
        return ""
    fits = "does not fit" if estimate.lacks_host_memory else "fits"
    needed, limit = format_bytes(estimate.node_host_bytes), format_bytes(estimate.host_limit)
    return f", {needed} of {limit} per node ({fits})"


def fit_line(fit: LargestFit) -> str:
    """Return the largest value that fits, its memory, and why the next value does not fit."""
    reason = ""
    if (limiting := fit.next or fit.estimate) is not None:
        reason = f"leaves less than {limiting.reserve_share:.0%} of the memory"
    if fit.next is not None and fit.next.shortages:
        reason = "; ".join(fit.next.shortages)
    if fit.estimate is None:
        return f"none: {fit.key}=1 does not fit ({reason})"
    memory = format_bytes(fit.estimate.peak_reserved)
    if fit.key == "model.num_layers":
        memory += f", {fit.estimate.num_params:,} parameters"
    if fit.next is None:
        return f"{fit.settings} ({memory}), the maximum"
    return f"{fit.settings} ({memory}); {fit.value + fit.multiple} does not fit ({reason})"


def show_translation(imported: ImportedConfig) -> None:
    """Print the settings that affect memory with their origin, and what is left out."""
    say(f"{imported.translation.tool}: {imported.translation.source.file}")
    reason = imported.engine_reason
    for row in imported.rows:
        settings = [x for x in row.settings if not (reason and x.startswith("engine="))]
        overridden = [each for each in settings if each in imported.overridden]
        notes = [f"overridden: {' '.join(overridden)}"] if overridden else []
        notes += [row.note] if row.note else []
        used = " ".join(each for each in settings if each not in overridden) or "-"
        say(f"  {row.key}: {used}{'  # ' if notes else ''}{'; '.join(notes)}")
    say(*(f"  (command line): {name}={text}" for name, text in imported.command_line.items()))
    say("", *_notes_on_translation(imported))


def _notes_on_translation(imported: ImportedConfig) -> Iterator[str]:
    translation = imported.translation
    if imported.engine_reason:
        yield f"engine  fsdpctl: {imported.engine_reason}"
    for row in translation.not_estimated:
        yield f"differs {row.key}={row.value}: {row.note}"
    if translation.unrecognized:
        yield f"unknown may change the estimate: {', '.join(translation.unrecognized)}"
    if unused := sorted(translation.source.no_memory_effect):
        yield f"unused  no effect on memory: {', '.join(unused)}"
    yield ""
