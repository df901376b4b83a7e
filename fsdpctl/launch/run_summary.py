"""The lines that describe a run before it starts."""

from collections.abc import Iterator
from importlib.util import find_spec

from fsdpctl.chats.values import count_of
from fsdpctl.checkpoint.pretrained import weights_folder
from fsdpctl.checkpoint.remote_checkpoints import remote_checkpoints_of
from fsdpctl.config.decoder_config import model_type_of
from fsdpctl.config.model import SCRIPT_PREFIX
from fsdpctl.config.schema import LENGTH_KEYS, Config, Origin
from fsdpctl.config.training import default_seq_len
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.script_data import ScriptData
from fsdpctl.estimate.library_kernels import MODULES
from fsdpctl.estimate.run_estimate import RunEstimate
from fsdpctl.io.packages import versions
from fsdpctl.io.resources import num_cores, threads_per_rank
from fsdpctl.io.texts import format_bytes, shorten_snapshots
from fsdpctl.models.build_model import count_active_parameters
from fsdpctl.models.experts import idle_parameters
from fsdpctl.models.quantized import count_weights, quantized_shapes
from fsdpctl.plan.strategy import FSDPCTL, Offload, get_strategy
from fsdpctl.resolve.machine import executed_strategy, note_on_tf32, shares_memory
from fsdpctl.resolve.prepare import Prepared
from fsdpctl.resolve.run_plan import RunPlan
from fsdpctl.run.directory import RunDirState, StartKind, changed_settings
from fsdpctl.run.environment import newest_versions
from fsdpctl.training.learning_rate import warmup_steps

_FEW_STEPS = 20


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def describe_run(
    opened: Prepared, plan: RunPlan, state: RunDirState, estimate: RunEstimate | None
) -> Iterator[str]:
    """Yield the first lines of a run: its main settings, with (auto) or (default) if not set.

    A script has no `estimate`.
    """
    rows = [
        ("model", _model(opened)),
        ("data", _data(opened.data)),
        ("ranks", _ranks(opened, plan)),
        ("batch", _batch(opened, plan)),
        ("length", _length(opened)),
        ("memory", _memory(estimate)),
        ("run", _run_directory(state)),
        ("experts", "" if estimate is None else _router_loss(opened)),
        ("note", "" if estimate is None else _note_on_float32(opened)),
        ("note", note_on_tf32(opened.config)),
        ("blocks", _blocks(plan.config)),
        *(("note", text) for text in (*opened.notes, *state.notes)),
        *(("changed", text) for text in changed_settings(state, plan.config)),
        ("changed", _changed_versions(state)),
    ]
    yield from (shorten_snapshots(f"{name:<8}{text}") for name, text in rows if text)


def _origin(opened: Prepared, name: str, plan: RunPlan | None = None) -> str:
    if plan is not None and plan.config.origin(name) is Origin.SELECTED:
        return " (auto)"
    return " (default)" if opened.config.is_auto(name) else ""


def _model(opened: Prepared) -> str:
    config, count = opened.config, sum(count_weights(opened.module).values())
    trained = sum(param.numel() for param in opened.module.parameters() if param.requires_grad)
    details = "" if trained == count else f" ({_count(trained)} trained)"
    if config.model.is_script_module:
        name = config.model.name.removeprefix(SCRIPT_PREFIX)
        return f"{name}, {_count(count)} parameters{details}, {_dtypes(opened)}"
    if (active := count_active_parameters(opened.module)) != count:
        details = f" ({_count(active)} active){details}"
    weights = "" if config.model.path is None else ", random weights"
    if config.model.is_pretrained:
        folder = str(weights_folder(config.model))
        weights = ", pretrained" if folder == config.model.title else f", weights from {folder}"
    if config.model.base_dtype is not None:
        packed = quantized_shapes(opened.module).values()
        experts = " and experts" if any(len(shape) == 3 for shape in packed) else ""
        weights += f", linear layers{experts} in {config.model.base_dtype}"
    family = "" if config.model.path is None else f"{model_type_of(config.model)}, "
    vocabulary = f"{config.model.vocab_size}{_origin(opened, 'model.vocab_size')}"
    return (
        f"{config.model.title}, {family}{_count(count)} parameters{details}, "
        f"vocabulary {vocabulary}, {_dtypes(opened)}{weights}"
    )


def _dtypes(opened: Prepared) -> str:
    precision = opened.config.precision
    param, reduce, master = precision.param_dtype, precision.reduce_dtype, precision.master_dtype
    others = {reduce: f"{reduce} reduction", master: f"{master} master weights"}
    if reduce == master:
        others = {master: f"{master} reduction and master weights"}
    others.pop(param, None)
    products = " with TF32 products" * opened.config.uses_tf32
    origin = _origin(opened, "precision.param_dtype")
    return ", ".join([f"{param}{products}{origin}", *others.values()])


def _router_loss(opened: Prepared) -> str:
    if not idle_parameters(opened.module.transformers_model):
        return ""
    detail = "its value depends on the micro-batches"
    if opened.config.model.router_aux_loss == "global":
        detail = f"with the token counts of all ranks; {detail}"
    off = "off: config.json has no output_router_logits"
    return f"auxiliary loss {f'on: {detail}' if opened.module.adds_aux_loss else off}"


def _note_on_float32(opened: Prepared) -> str:
    module, dtype = opened.module, opened.config.precision.param_dtype
    keys = getattr(module.transformers_model, "_keep_in_fp32_modules_strict", None) or ()
    names = [name for name, _ in module.named_parameters() if any(key in name for key in keys)]
    if dtype == "float32" or not names:
        return ""
    return (
        f"{len(names)} parameters that transformers keeps in float32, such as {names[0]}, are "
        f"used in {dtype}; set precision=fp32 to keep them"
    )


def _ranks(opened: Prepared, plan: RunPlan) -> str:
    config, ranks = plan.config, plan.batches.world_size
    each, nodes = config.launch.nproc_per_node, config.launch.nnodes
    total = "" if nodes == 1 else f"{ranks}, on each of {nodes} nodes "
    engine = "" if config.engine.name == FSDPCTL else f"engine {config.engine.name}, "
    threads = ""
    if config.launch.device == "cpu" and not config.model.is_script_module:  # a script has its own
        threads = f"{count_of(threads_per_rank(each or 1), 'thread')} each on "
        threads += f"{count_of(num_cores(), 'core')}, "
    return (
        f"{total}{each}{_origin(opened, 'launch.nproc_per_node')} on "
        f"{config.launch.device}{_origin(opened, 'launch.device')}, {threads}"
        f"{engine}{_strategy(config, ranks)}"
    )


def _strategy(config: Config, ranks: int) -> str:
    settings = config.strategy
    strategy, shard_size = get_strategy(settings.name), settings.dp_shard_size or ranks
    name = f"{strategy.name} ({strategy.known_as})"
    if 1 < shard_size < ranks:
        name += f" in {ranks // shard_size} replicas of {shard_size} ranks"
    if settings.owner_map not in (None, "even"):
        name += f" with {settings.owner_map} owners"
    name += ", parameters in host memory" * (Offload.PARAMS in settings.offloaded)
    if shares_memory(config):
        return f"{name}, sharing memory"
    effective, _ = executed_strategy(config, strategy, shard_size)
    if effective.name == strategy.name:
        return name
    if ranks == 1:
        return f"{name} (one rank: runs as {effective.name})"
    replicas = "a replica per rank" if shard_size == 1 else "one replica"
    return f"{name} ({replicas}: runs as {effective.name})"


def _data(data: DataSet) -> str:
    if isinstance(data.train, ScriptData):
        held_out = data.val.num_tokens if data.val else "none"
        return f"{data.description}: {data.train.num_tokens} samples, {held_out} for validation"
    tokenizer = data.tokenizer.name if data.has_text else "unknown tokenizer"
    text = f"{data.description}: {_count(data.train.num_tokens)} tokens ({tokenizer})"
    if data.val is None:
        return f"{text}, none for validation"
    return f"{text}, {_count(data.val.num_tokens)} for validation"


def _batch(opened: Prepared, plan: RunPlan) -> str:
    batches, train, model = plan.batches, plan.config.train, plan.config.model
    length = _origin(opened, "train.seq_len")
    if length and train.seq_len < default_seq_len(model.name, model.max_seq_len):
        length = " (default: limited by the data)"
    micro_batches = "micro-batch" if batches.num_micro_batches == 1 else "micro-batches"
    group_size = batches.context_parallel
    groups = batches.world_size // group_size
    unit = "rank" if batches.world_size == 1 else "ranks"
    if group_size > 1:
        unit = f"group{'s' * (groups > 1)} of {group_size} ranks"
    # By default, the micro-batch size follows from the other sizes; that is not worth a mark.
    selected = _origin(opened, "train.micro_batch_size", plan).replace(" (default)", "")
    each = "" if model.is_script_module else f" of {train.seq_len} tokens{length}"
    return (
        f"{batches.global_batch_size} samples{_origin(opened, 'train.global_batch_size')}{each} "
        f"per step: {groups} {unit} x {batches.num_micro_batches} {micro_batches} "
        f"of {batches.micro_batch_size}{selected}"
    )


def _length(opened: Prepared) -> str:
    config, train = opened.config, opened.config.train
    assert train.steps is not None
    steps = train.steps
    tokens = steps * train.global_batch_size * train.seq_len
    epochs = steps * train.global_batch_size / len(opened.data.train.samples(train.seq_len))
    unit = "samples" if config.model.is_script_module else "tokens"
    warmup = warmup_steps(config.lr_scheduler, steps)
    reached = f" at step {warmup}" if warmup >= steps > 0 else ""
    hint = ""
    if steps < _FEW_STEPS and config.is_auto("train.steps"):
        hint = f"; only {steps}: set train.epochs or a smaller train.global_batch_size for more"
    origin = " (default)" if not config.is_set(*LENGTH_KEYS) else ""
    epochs_text = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    return (
        f"{steps:,} step{'s' * (steps != 1)}{origin}, {_count(tokens)} {unit}, {epochs_text} "
        f"epoch{'s' * (epochs_text != '1')}{hint}; peak learning "
        f"rate {config.optimizer.lr:g}{_origin(opened, 'optimizer.lr')}{reached}"
    )


def _memory(estimate: RunEstimate | None) -> str:
    if estimate is None:
        return ""
    text = f"{format_bytes(estimate.peak_reserved)} per rank, estimated"
    if missing := [each for each in estimate.assumed_packages if find_spec(MODULES[each]) is None]:
        text += f"; far more, because {' and '.join(missing)} is not installed"
    if estimate.peak_reserved > estimate.available:
        needed = format_bytes(estimate.peak_reserved + estimate.outside_allocator.high)
        text += f"; {needed} with memory outside the allocator"
        text += f", {format_bytes(estimate.memory_bytes)} available"
    return text


def _blocks(config: Config) -> str:
    recomputed = config.activation_checkpointing
    parts = (
        "compiled" * config.train.compile,
        f"activation checkpointing {recomputed.title}" * recomputed.is_on,
    )
    return ", ".join(filter(None, parts))


def _changed_versions(state: RunDirState) -> str:
    if state.start_kind is not StartKind.RESUME:
        return ""
    source = state.source
    previous = source.manifest.versions if source else newest_versions(state.run_dir)
    parts = [
        f"{name} was {previous[name]}, is {now}"
        for name, now in versions().items()
        if previous.get(name, now) != now
    ]
    return f"{'; '.join(parts)}, which may change the losses" if parts else ""


def _run_directory(state: RunDirState) -> str:
    remote = remote_checkpoints_of(state.config)
    uploads = "" if remote is None else f"; checkpoints are uploaded to {remote.url}"
    source = f" of {state.source}" if state.source else ""
    resumed = {StartKind.NEW: "new", StartKind.FINISHED: f"finished at step {state.step}"}.get(
        state.start_kind, f"resumes at step {state.step}{source}"
    )
    return f"{state.run_dir} ({resumed}){uploads}"
