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
from fsdpctl.plan.strategy import STRATEGIES, strategies_of

_SMALL = ("rounding", "workspaces")  # purposes without a column
_VERDICTS = {
    "fits": "fits",
    "thrashes": "fits only if the allocator repeatedly empties its cache, which is slow",
    "too_large": "does not fit",
}


def show_all(
    estimator: Estimator, config: Config, estimates: list[RunEstimate], fits: list[LargestFit]
) -> None:
    _show_strategies(estimator, estimates)
    say(*notes_on_price(config) if has_length(config) else ())
    shown = {each.config.strategy.name for each in estimates}
    engine = config.engine.name
    known = strategies_of(engine)
    if missing := [name for name in STRATEGIES if name not in known]:
        say(f"engine={engine} does not support {', '.join(missing)}")
    if alike := [name for name in known if not is_distinct_on_cluster(config, name)]:
        say(f"on one node, {', '.join(alike)} do what strategies above do")
    if refused := [name for name in known if name not in {*shown, *alike}]:
        say(f"other settings exclude {', '.join(refused)}; strategy={refused[0]} shows why")
    for each, fit in zip(estimates, fits, strict=False):
        say(f"{each.config.strategy.name}: {fit_line(fit)}")


def show_one(estimator: Estimator, found: RunEstimate, fits: list[LargestFit]) -> None:
    say(*heading([found]))
    _show_breakdown(found)
    say("", *conclusions(found), *_time_lines(estimator, found))
    if fits:
        say(f"fit     {fit_line(fits[0])}")
    nothing_fits = fits[0].estimate is None if fits else not found.fits
    if nothing_fits:
        say(*note_on_local_cpu(found), *describe_suggestions(suggest(estimator, found.plan)))


def _time_lines(estimator: Estimator, found: RunEstimate) -> Iterator[str]:
    """Yield lines about the time of a run that fits; on a CPU only if its length is set."""
    if found.verdict == "too_large":
        return
    try:
        yield from run_time(estimator, found).lines()
    except UsageError as error:
        if has_length(found.config):
            tokens = found.tokens_per_step
            yield f"time    {error}"
            yield run_length(found.config, tokens, estimator).line(tokens)


def time_dict(estimator: Estimator, found: RunEstimate) -> dict[str, Any]:
    with suppress(UsageError):
        return run_time(estimator, found).to_dict()
    return {}


def heading(estimates: Sequence[RunEstimate]) -> list[str]:
    first = estimates[0]
    config, launch, precision = first.config, first.config.launch, first.config.precision
    nodes = "" if launch.nnodes == 1 else f" on {launch.nnodes} nodes"
    shared = config.train.context_parallel
    who = "rank" if shared == 1 else f"group of {shared} ranks"
    batches, prefetches, recomputations = [
        " or ".join(dict.fromkeys(texts)) for texts in zip(*map(_selected, estimates), strict=True)
    ]
    products = " with TF32 products" * config.uses_tf32
    compiled = "; estimated without torch.compile" if config.train.compile else ""
    base = "" if config.model.base_dtype is None else f", {config.model.base_dtype} linear layers"
    samples, given = first.batches.global_batch_size, config.train.global_batch_size
    raised = f" (assumes train.global_batch_size={samples}, not {given})" if samples > given else ""
    return [
        f"model   {config.model.title}, {first.num_params:,} parameters{_trained(first)}",
        f"ranks   {config.num_ranks} on {launch.device}{nodes}, "
        f"{format_bytes(first.memory_bytes)} each (cluster={config.cluster.name}), "
        f"engine {config.engine.name}",
        f"dtypes  {precision.param_dtype} compute{products}, {precision.reduce_dtype} reduction, "
        f"{precision.master_dtype} master weights{base}",
        f"step    {first.tokens_per_step:,} tokens{raised}: each {who} {batches} samples of "
        f"{config.train.seq_len}; accumulation {config.accumulation.name}; "
        f"activation checkpointing {recomputations}{compiled}; prefetch {prefetches}",
        "",
    ]


def _selected(estimate: RunEstimate) -> tuple[str, str, str]:
    batches, prefetch = estimate.batches, estimate.config.prefetch
    return (
        f"{batches.num_micro_batches} x {batches.micro_batch_size}",
        f"{prefetch.forward} forward, {prefetch.backward} backward",
        estimate.config.activation_checkpointing.title,
    )


def _trained(estimate: RunEstimate) -> str:
    counts = {"active": estimate.num_active, "trained": estimate.num_trained}
    parts = [f", {n:,} {what}" for what, n in counts.items() if n != estimate.num_params]
    return "".join(parts)


def _show_strategies(estimator: Estimator, estimates: list[RunEstimate]) -> None:
    found = estimates[0].step.breakdown
    parts = [x for x in found if x not in _SMALL and any(e.step.breakdown[x] for e in estimates)]
    figures = {"step_seconds": "s/step"}
    if has_length(estimates[0].config):
        figures = {"hours": "hours", "cost": "cost"}
    rows = []
    for each in estimates:
        cells = [format_bytes(each.step.breakdown[name]) for name in parts]
        times = time_dict(estimator, each)
        cells += ["-" if (x := times.get(name)) is None else three_digits(x) for name in figures]
        reserved = format_bytes(each.peak_reserved)
        rows.append((each.config.strategy.name, verdict(each), *cells, reserved))
    names = [*(name.replace("_", " ") for name in parts), *figures.values(), "reserved"]
    show_table(("strategy", "verdict", *names), rows, right=names)


def verdict(found: RunEstimate) -> str:
    return found.verdict if found.verdict != "too_large" else _VERDICTS[found.verdict]


def _show_breakdown(found: RunEstimate) -> None:
    rows = []
    for name, nbytes in found.step.breakdown.items():
        largest = [each for each in found.step.peak.largest if each.category == name]
        named = [
            f"{each.count} x {each.description}, {format_bytes(each.nbytes)}"
            for each in largest[:2]
        ]
        rows.append((name.replace("_", " "), format_bytes(nbytes), "; ".join(named)))
    rows.append(("allocated", format_bytes(found.allocated), f"peak at: {found.step.peak.phase}"))
    title = f"{found.config.strategy.name}, per rank at the peak"
    show_table((title, "", "largest tensors"), rows, right=("",))


def conclusions(found: RunEstimate) -> list[str]:
    config, outside = found.config, found.outside_allocator
    on_device = found.available - found.peak_reserved
    lines = []
    if config.launch.device == "cuda":
        each = [f"{format_bytes(nbytes)} {name}" for name, nbytes in found.step.reserved.items()]
        lines.append(
            f"reserved by the allocator: {', '.join(each)}; launch.allocator="
            f"{config.launch.allocator}, model.init="
            f"{'pretrained' if config.model.is_pretrained else 'random'}"
        )
    if found.shared_bytes:
        lines.append(
            f"shared  {format_bytes(found.shared_bytes)}, once for all ranks; each rank counts its "
            "share; the resident memory of each process includes all of it"
        )
    lines += [
        f"outside {format_bytes(outside.low)} to {format_bytes(outside.high)} (assumed): the "
        "process" + (", its CUDA context, and NCCL" if config.launch.device == "cuda" else ""),
        f"host    about {format_bytes(found.host_bytes)} of memory per worker{_on_node(found)}; a "
        f"checkpoint takes {format_bytes(found.checkpoint_bytes)} of disk",
        f"verdict {_VERDICTS[found.verdict]}: {format_bytes(abs(found.margin))} "
        f"{'to spare' if found.margin >= 0 else 'missing'}"
        f"{' per rank of host memory' if found.margin < on_device else ''}{_reserve(found)}",
    ]
    return lines


def _reserve(found: RunEstimate) -> str:
    if not found.reserve or not found.fits:
        return ""
    share = f"{format_bytes(found.reserve)}, the {found.reserve_share:.0%} that a selection leaves"
    return f" ({'with' if found.leaves_reserve else 'less than'} {share})"


def _on_node(found: RunEstimate) -> str:
    if found.host_limit is None:
        return ""
    fits = "does not fit" if found.lacks_host_memory else "fits"
    return (
        f", {format_bytes(found.node_bytes)} of {format_bytes(found.host_limit)} per node ({fits})"
    )


def fit_line(found: LargestFit) -> str:
    over = ""
    if (more := found.next or found.estimate) is not None:
        over = f"leaves less than {more.reserve_share:.0%} of the memory"
    if found.next is not None and found.next.shortages:
        over = "; ".join(found.next.shortages)
    if found.estimate is None:
        return f"none: {found.key}=1 does not fit ({over})"
    held = format_bytes(found.estimate.peak_reserved)
    if found.key == "model.num_layers":
        held += f", {found.estimate.num_params:,} parameters"
    if found.next is None:
        return f"{found.settings} ({held}), the maximum"
    return f"{found.settings} ({held}); {found.value + found.multiple} does not fit ({over})"


def show_translation(asked: ImportedConfig) -> None:
    say(f"{asked.translation.tool}: {asked.translation.file}")
    for row in asked.rows:
        words = [
            word for word in row.settings if not (asked.engine_reason and word[:7] == "engine=")
        ]
        lost = [word for word in words if word in asked.overridden]
        notes = [f"overridden: {' '.join(lost)}"] if lost else []
        notes += [row.note] if row.note else []
        kept = " ".join(word for word in words if word not in lost) or "-"
        say(f"  {row.key}: {kept}{'  # ' if notes else ''}{'; '.join(notes)}")
    say(*(f"  (command line): {name}={text}" for name, text in asked.command_line.items()))
    say("", *_left_out(asked))


def _left_out(asked: ImportedConfig) -> Iterator[str]:
    found = asked.translation
    if asked.engine_reason:
        yield f"engine  fsdpctl: {asked.engine_reason}"
    for row in found.excluded:
        yield f"differs {row.key}={row.value}: {row.note}"
    if found.unrecognized:
        yield f"unknown may change the estimate: {', '.join(found.unrecognized)}"
    if found.no_memory_effect:
        yield f"unused  no effect on memory: {', '.join(found.no_memory_effect)}"
    yield ""
