"""What is said of a run before it starts."""

from collections import Counter
from collections.abc import Iterator

from fsdpctl.checkpoint.pretrained import weights_folder
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import usual_length
from fsdpctl.engine.build import divide_module
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.estimate.run_plan import divide, item_sizes
from fsdpctl.optim.schedule import warmup_steps
from fsdpctl.plan.engines import OURS
from fsdpctl.plan.strategy import effective_strategy, get_strategy
from fsdpctl.resolve.run import ResolvedRun
from fsdpctl.run.directory import Standing, Start
from fsdpctl.run.flops import describe_flops
from fsdpctl.run.progress import format_bytes

_SHOWN_RANKS = 8
_OWNED = 4  # master, gradient and two moments of each element


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def describe_run(run: ResolvedRun, start: Start, estimate: RunEstimate) -> list[str]:
    """The first lines of a run: everything that was decided, `auto` included."""
    rows = [
        ("model", _model(run)),
        ("ranks", _ranks(run)),
        ("data", _data(run)),
        ("batch", _batch(run)),
        ("length", _length(run)),
        ("memory", _memory(estimate)),
        ("flops", describe_flops(run.config, run.module)),
        ("run", _run(start)),
    ]
    rows += [("blocks", text) for text in _blocks(run)]
    rows += [("note", text) for text in (*run.notes, *start.notes)]
    lines = [f"{name:<8}{text}" for name, text in rows]
    return [*lines, *(f"changed {line}" for line in start.differences)]


def _auto(run: ResolvedRun, name: str) -> str:
    return " (auto)" if name in run.automatic else ""


def _num_params(run: ResolvedRun) -> int:
    return sum(param.numel() for param in run.module.parameters())


def _model(run: ResolvedRun) -> str:
    config = run.config
    trained = sum(param.numel() for param in run.module.parameters() if param.requires_grad)
    in_part = "" if trained == _num_params(run) else f" ({_count(trained)} trained)"
    return (
        f"{config.model.name}, {_count(_num_params(run))} parameters{in_part}, vocabulary "
        f"{config.model.vocab_size}{_auto(run, 'model.vocab_size')}, {_weights(config)}"
    )


def _weights(config: Config) -> str:
    """Where the first ones come from."""
    if config.model.is_pretrained:
        return f"weights read from {weights_folder(config.model)}"
    return f"weights drawn from seed {config.train.seed}"


def _ranks(run: ResolvedRun) -> str:
    config = run.config
    precision = config.precision
    dtypes = (
        precision.param_dtype
        if precision.param_dtype == precision.reduce_dtype == precision.master_dtype
        else f"{precision.param_dtype} compute, {precision.reduce_dtype} reduction, "
        f"{precision.master_dtype} masters"
    )
    each, nodes = config.launch.nproc_per_node, config.launch.nnodes
    nodes_too = "" if nodes == 1 else f"{run.batches.world_size}, on each of {nodes} nodes "
    return (
        f"{nodes_too}{each}{_auto(run, 'launch.nproc_per_node')} on "
        f"{config.launch.device}{_auto(run, 'launch.device')}, {_engine(run)}{_strategy(run)}, "
        f"prefetch {config.prefetch.name}, {dtypes}{_auto(run, 'precision.param_dtype')}"
    )


def _engine(run: ResolvedRun) -> str:
    name = run.config.engine.name
    return "" if name == OURS else f"engine {name}, "


def _strategy(run: ResolvedRun) -> str:
    """The one that was asked for, and what runs where that is another."""
    given, ranks = run.config.strategy, run.batches.world_size
    row, size = get_strategy(given.name), given.dp_shard_size or ranks
    name = f"{row.name} ({row.known_as})"
    if 1 < size < ranks:
        name += f" in {ranks // size} copies of {size} ranks"
    if given.owner_map != "even":
        name += f" with {given.owner_map} owners"
    effective, _ = effective_strategy(row, size, ranks)
    if effective.name == row.name:
        return name
    if ranks == 1:
        return f"{name} (one rank: runs as {effective.name})"
    copies = "a copy on each rank" if size == 1 else "one copy"
    return f"{name} ({copies}: runs as {effective.name})"


def _data(run: ResolvedRun) -> str:
    data = run.data
    text = f"{data.description}: {_count(data.train.num_tokens)} tokens ({data.tokenizer.name})"
    if data.val is None:
        return f"{text}, none held out"
    text += f", {_count(data.val.num_tokens)} to validate"
    if data.gzip_bits_per_byte is not None:
        text += f" (gzip -9: {data.gzip_bits_per_byte:.2f} bits per byte)"
    return text


def _batch(run: ResolvedRun) -> str:
    plan, train = run.batches, run.config.train
    model, auto = run.config.model, _auto(run, "train.seq_len")
    if auto and train.seq_len < usual_length(model.name, model.max_seq_len):
        auto = " (auto: no more than a part of the data has)"
    passes = "micro-batch" if plan.num_micro_batches == 1 else "micro-batches"
    ranks = "rank" if plan.world_size == 1 else "ranks"
    return (
        f"{plan.global_batch_size} samples of {train.seq_len} tokens{auto} "
        f"a step: {plan.world_size} {ranks} x {plan.num_micro_batches} {passes} "
        f"of {plan.micro_batch_size}"
        f"{_auto(run, 'train.micro_batch_size')}"
    )


def _length(run: ResolvedRun) -> str:
    train = run.config.train
    tokens = run.total_steps * train.global_batch_size * train.seq_len
    samples = len(run.data.train.rows(train.seq_len))
    epochs = run.total_steps * train.global_batch_size / samples
    warmup = warmup_steps(run.config.lr_scheduler, run.total_steps)
    late = warmup >= run.total_steps > 0
    reached = f", not reached within lr_scheduler.warmup_steps={warmup}" if late else ""
    return (
        f"{run.total_steps} steps, {_count(tokens)} tokens, {epochs:.2g} epochs; peak learning "
        f"rate {run.config.optimizer.lr:g}{_auto(run, 'optimizer.lr')}{reached}"
    )


def _memory(estimate: RunEstimate) -> str:
    """What the fullest rank will hold."""
    largest = sorted(estimate.step.breakdown.items(), key=lambda each: each[1], reverse=True)
    parts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest if size > 0]
    text = f"{format_bytes(estimate.allocated)} a rank at most ({estimate.step.peak.when}): "
    text += ", ".join(parts)
    if estimate.config.launch.device == "cuda":
        text += f"; {format_bytes(estimate.peak_reserved)} reserved"
    if estimate.verdict != "fits":
        text += f"; more than there is, {format_bytes(estimate.memory_bytes)}: try `fsdpctl "
        text += "estimate-memory` with the same words"
    return text


def _blocks(run: ResolvedRun) -> Iterator[str]:
    config = run.config
    said = ["compiled"] if config.train.compile else []
    if config.activation_checkpointing.name != "none":
        said.append(f"activation checkpointing {config.activation_checkpointing.name}")
    if said:
        yield ", ".join(said)


def _run(start: Start) -> str:
    if start.standing is Standing.NEW:
        return f"{start.run_dir} (new)"
    if start.standing is Standing.FINISHED:
        return f"{start.run_dir} (finished at step {start.step})"
    source = f" of {start.source}" if start.source else ""
    return f"{start.run_dir} (resumes at step {start.step}{source})"


def describe_units(run: ResolvedRun) -> Iterator[str]:
    """Units and their layout over the ranks, a line each; then each rank's share.

    Of our engine: PyTorch's have none that spans parameters.
    """
    if run.config.engine.name != OURS:
        return
    division = divide(run.config, divide_module(run.module, None)).division
    units, layouts = division.units, division.layouts
    width = max(len(unit.name) for unit in units) + 2
    yield f"{'unit':<{width}}{'kind':<11}{'parameters':>14}{'padding':>10}  elements of each rank"
    totals: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    sizes = item_sizes(run.config)
    for unit in units:
        numel = sum(param.numel for param in unit.params)
        padded = sum(layout.numel for layout in layouts[unit.name])
        owned = [
            sum(part.numel for part in parts)
            for parts in zip(*(layout.owned_parts for layout in layouts[unit.name]), strict=True)
        ]
        totals.update(dict(enumerate(owned)))
        for layout in layouts[unit.name]:
            copies = _OWNED if layout.trainable else 1
            size = sizes.kept(layout) * copies
            nbytes.update({i: part.numel * size for i, part in enumerate(layout.owned_parts)})
        shown = _shares(owned)
        yield f"{unit.name:<{width}}{unit.kind:<11}{numel:>14,}{padded - numel:>10,}  {shown}"
    shares = [totals[rank] for rank in sorted(totals)]
    mean = sum(shares) / len(shares)
    yield f"{'all':<{width}}{'':<11}{_num_params(run):>14,}{'':>10}  {_shares(shares)}"
    if mean:
        held = "  ".join(map(format_bytes, _distinct([nbytes[rank] for rank in sorted(nbytes)])))
        yield f"masters, gradients and optimizer states of what a rank owns: {held}"
        yield f"the largest share is {max(shares) / mean:.3f} of the mean"


def _distinct(owned: list[int]) -> list[int]:
    """A number for each rank; one for all where they are alike, the extremes of many."""
    if len(set(owned)) == 1:
        return owned[:1]
    return owned if len(owned) <= _SHOWN_RANKS else [min(owned), max(owned)]


def _shares(owned: list[int]) -> str:
    between = " to " if len(owned) > _SHOWN_RANKS else "  "
    return between.join(f"{numel:,}" for numel in _distinct(owned))
