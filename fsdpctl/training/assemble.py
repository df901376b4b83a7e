"""Constructs the objects of a training run from a resolved configuration."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.initial_weights import (
    BaseWeights,
    initial_weights,
    open_pretrained,
    open_with_base,
)
from fsdpctl.checkpoint.load import load_into, load_weights
from fsdpctl.checkpoint.pretrained import weights_folder
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import newest_checkpoint, older_checkpoint_hint
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.mesh import ObjectExchange, collectives_for
from fsdpctl.comm.rank_status import DRAWING, STATUS_PAGE
from fsdpctl.comm.world import World
from fsdpctl.config.schema import Resolved
from fsdpctl.data.batches import Batches
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.open_data import open_data
from fsdpctl.engine.blocks import prepare_blocks
from fsdpctl.engine.build import Sharding, WeightInit
from fsdpctl.engine.shard_model import shard_from
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.run_files import CHECKPOINTS
from fsdpctl.models.build_model import build_model, initialize_parameter
from fsdpctl.models.context_parallel import use_exchange
from fsdpctl.models.module_spec import block_names, torch_dtype
from fsdpctl.models.quantized import quant_format_of, quantized_shapes
from fsdpctl.models.transformers_build import fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.muon import ShardedMuon
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.plan.batch_plan import context_groups
from fsdpctl.plan.optimizers import MUON, get_optimizer
from fsdpctl.plan.strategy import FSDPCTL, Offload, get_strategy, ranks_per_replica
from fsdpctl.resolve.machine import owner_map_of, shares_memory
from fsdpctl.resolve.run_data import vocabulary_of
from fsdpctl.resolve.run_plan import RunPlan
from fsdpctl.resolve.script_module import ScriptTask
from fsdpctl.run.data_record import check_same_data, recorded_fingerprint
from fsdpctl.run.environment import add_start, describe_start, device_name
from fsdpctl.training.callbacks.checkpoints import Checkpoints
from fsdpctl.training.callbacks.generation import SampleText
from fsdpctl.training.callbacks.heartbeat import Heartbeat
from fsdpctl.training.callbacks.memory import HeapTrim, watch_allocations
from fsdpctl.training.callbacks.profiling import Profiling
from fsdpctl.training.callbacks.reporting import CompilerReport, EstimateReport, RunReporter
from fsdpctl.training.callbacks.self_check import SelfCheck
from fsdpctl.training.callbacks.validation import Validation
from fsdpctl.training.journal import Journal
from fsdpctl.training.script_precision import widen_parameters
from fsdpctl.training.train_step import LaunchContext, Optimizer, TrainedModel, TrainingParts
from fsdpctl.training.trainer import Trainer

OPTIMIZER_CLASSES: dict[str, Any] = {"adamw": ShardedAdamW, "sgd": ShardedSGD, MUON: ShardedMuon}


def make_model(
    config: Resolved,
    device: torch.device,
    *,
    strategy: str | None = None,
    empty: bool = False,
    trains: bool = False,
    module: nn.Module | None = None,
) -> ShardedModel:
    """Return the model, sharded by fsdpctl's engine as configured. Collective.

    Weights are initialized from the seed, or zeros if `empty`. If `trains`, optimizer states are in
    host memory as configured. A `module` with values replaces the configured decoder.
    """
    if strategy:
        config = replace(config, strategy=config.strategy.with_name(strategy))
    sharding, initialize = sharding_of(config, trains=trains), None
    if module is not None:
        module.to(device)
        if config.precision.param_dtype != "float32":
            widen_parameters(module)
        prepare_blocks(module, config)
    else:
        module = make_module(config)
        initialize = None if empty else _initializer(config, module)
    return shard_from(WeightInit(device, initialize, is_zero=empty), module, sharding)


def single_rank_strategy(config: Resolved) -> str:
    """Return the strategy for a single rank; it gathers parameters that are in host memory."""
    return "full_shard" if Offload.PARAMS in config.strategy.offloaded else "no_shard"


def sharding_of(config: Resolved, *, trains: bool = False) -> Sharding:
    """Return how fsdpctl's engine shards the model.

    If `trains`, offloads are as configured. Else, master weights are stored with the parameters.
    """
    strategy = config.strategy
    offloads_params = Offload.PARAMS in strategy.offloaded
    # STATES includes the master weights.
    untrained = Offload.STATES | Offload.PARAMS if offloads_params else Offload.NONE
    return Sharding(
        strategy.name, dp_shard_size=strategy.dp_shard_size, owner_map=owner_map_of(config),
        prefetch=config.prefetch.planned, precision=config.precision.planned,
        offload=strategy.offloaded if trains else untrained, share_memory=shares_memory(config),
    )  # fmt: skip


def make_trained_model(
    config: Resolved, device: torch.device, *, empty: bool, script_module: nn.Module | None = None
) -> TrainedModel:
    """Return the model, or a script's module, sharded by the configured engine. Collective."""
    model: TrainedModel
    if config.engine.name == FSDPCTL:
        model = sharded = make_model(config, device, empty=empty, trains=True, module=script_module)
        sharded.mesh.measure_waits()
        # step() only starts to gather parameters, which the next forward waits for by unit.
        sharded.overlap_param_gather = True
    else:
        from fsdpctl.torch_engines.model import build_torch_engine  # takes a second
        from fsdpctl.torch_engines.settings import TorchEngineSettings

        plain, strategy = make_module(config), get_strategy(config.strategy.name)
        ranks, precision = collectives_for(device).size, config.precision
        setup = TorchEngineSettings(
            config.engine.name, tuple(block_names(plain)),
            ranks_per_replica(strategy, ranks, config.strategy.dp_shard_size),
            reshard_after_forward=strategy.reshard_after_forward,
            prefetch=config.prefetch.planned, compiles=config.train.compile,
            param_dtype=torch_dtype(str(precision.param_dtype)),
            reduce_dtype=torch_dtype(str(precision.reduce_dtype)),
            master_dtype=torch_dtype(str(precision.master_dtype)),
        )  # fmt: skip
        initialize = None if empty else _initializer(config, plain)
        model = build_torch_engine(plain, setup, device, initialize)
    module: Any = model.module
    module.reduce_counts = model.collectives.all_reduce  # expert routers sum their token counts
    return model


def _initializer(config: Resolved, module: nn.Module) -> Callable[[str, Tensor], None]:
    """Return the initializer of a parameter, which also reports progress to the watchdog."""
    quantized, packing = quantized_shapes(module), quant_format_of(module)

    def initialize(name: str, param: Tensor) -> None:
        STATUS_PAGE.at(DRAWING)
        values = param
        if name in quantized:
            values = torch.empty(quantized[name], device=param.device)
        initialize_parameter(name, values, seed=config.train.seed, config=config.model)
        if packing is not None and name in quantized:
            param.copy_(packing.quantize(values))

    return initialize


def make_module(config: Resolved) -> TransformersDecoder:
    """Return the module on the meta device, with blocks checkpointed and compiled as configured."""
    module = build_model(config.model)
    fill_buffers(module)
    prepare_blocks(module, config)
    return module


def make_optimizer(config: Resolved, model: TrainedModel) -> Optimizer:
    """Return the optimizer over the model's shards; UsageError if no optimizer has this name."""
    settings, optimizer_info = config.optimizer, get_optimizer(config.optimizer.name)
    options = {name: getattr(settings, name) for name in (*optimizer_info.keys, "weight_decay")}
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    if dtype := options.get("state_dtype"):
        options["state_dtype"] = getattr(torch, dtype)
    # The trainer sets the learning rate before every step.
    optimizer_class = OPTIMIZER_CLASSES[optimizer_info.name]
    optimizer: Optimizer = optimizer_class(model, lr=settings.lr or 0.0, **options)
    return optimizer


def enable_context_parallel(device: torch.device, num_ranks: int, context_parallel: int) -> None:
    """Let attention exchange tensors with the ranks that share this rank's samples. Collective."""
    if context_parallel > 1:
        groups = context_groups(num_ranks, context_parallel)
        use_exchange(collectives_for(device, groups, "context").all_to_all)


def make_trainer(
    plan: RunPlan,
    world: World,
    launch_context: LaunchContext,
    *,
    shows: bool,
    only_measures: bool = False,
    task: ScriptTask | None = None,
) -> Trainer:
    """Return the trainer of a run in the state of its newest checkpoint. Collective.

    If `shows`, rank 0 shows the progress, writes heartbeats and uploads checkpoints. If
    `only_measures`, the trainer runs no validation and no save. A script has a `task`.
    """
    config, ranks = plan.config, ObjectExchange()
    run_dir = Path(str(config.train.run_dir))
    is_rank_0 = world.rank == 0
    heartbeat = Heartbeat(run_dir, ObjectExchange(), is_on=shows and is_rank_0)
    if config.log.memory_snapshot:
        watch_allocations(world.device)
    devices = ranks.all_gather_values(device_name(world.device))
    if is_rank_0:
        add_start(run_dir, describe_start(run_dir, devices))
    parts, progress, bases = _load(plan, run_dir, world, ranks, task)
    journal = Journal(config, run_dir, progress.step, is_rank_0=is_rank_0, shows=shows)
    if reason := parts.model.collectives.not_shared_reason:
        journal.warn(f"ranks do not share memory: {reason}")
    if only_measures:
        reports = [RunReporter(journal, checkpoints=None), EstimateReport(run_dir, progress.step)]
        return Trainer(parts, progress, launch_context, journal, reports)
    checkpoints = Checkpoints(config, ranks, journal, bases, uploads=shows and is_rank_0)
    # Hooks run in this order, at the end too: a step is checked and validated before it is saved.
    callbacks = [
        SelfCheck(config.train.self_check, progress.step, sharding_of(config)),
        Validation(config, has_data=parts.val_batches is not None),
        Profiling(parts.model, run_dir, world.rank, at_start=config.train.profile),
        checkpoints,
        RunReporter(journal, checkpoints),
        heartbeat,
        EstimateReport(run_dir, progress.step),
        SampleText(),
        *([CompilerReport(journal)] if config.train.compile else []),
        *([HeapTrim()] if world.device.type == "cpu" else []),
    ]
    return Trainer(parts, progress, launch_context, journal, callbacks)


def _load(
    plan: RunPlan, run_dir: Path, world: World, ranks: ObjectExchange, task: ScriptTask | None
) -> tuple[TrainingParts, Progress, list[BaseWeights]]:
    config, batches = plan.config, plan.batches
    train, data = config.train, _open_data(config, ranks) if task is None else task.data
    if len(set(ranks.all_gather_values(data.fingerprint))) > 1:
        location = "data" if task is not None else f"data.path={config.data.path}"
        problem = "data differs between ranks; expected identical files on all nodes"
        raise UsageError(f"{location}: {problem}")
    # A restart may come days after the check of the start.
    check_same_data(run_dir, data, recorded_fingerprint(run_dir))
    enable_context_parallel(world.device, world.world_size, train.context_parallel)
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    loads_weights = newest is not None or config.model.is_pretrained
    module = None if task is None else task.module
    model = make_trained_model(config, world.device, empty=loads_weights, script_module=module)
    optimizer = make_optimizer(config, model)
    progress, bases = _load_state(config, model, optimizer, newest)
    # A barrier: the slowest rank may load for longer than NCCL's timeout of the first collective.
    ranks.all_gather_values(None)
    STATUS_PAGE.at("ready")
    val, vocab_size = data.val, data.vocab_size or vocabulary_of(config, data)
    train_batches = Batches(data.train.samples(train.seq_len), batches, train.seed, vocab_size)
    val_batches = None
    if val is not None:
        val_batches = Batches(val.samples(train.seq_len), batches, seed=0, vocab_size=vocab_size)
    objects = data, model, optimizer, train_batches, val_batches
    return TrainingParts(config, run_dir, *objects, world.device), progress, bases


def _open_data(config: Resolved, ranks: ObjectExchange) -> DataSet:
    """Return the data. One rank of each node first writes the cache for all. Collective.

    If that rank fails, the launcher ends the ranks that wait for it.
    """
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    data = open_data(config.data, config.train.seed) if is_first else None
    ranks.all_gather_values(None)  # a barrier
    return data or open_data(config.data, config.train.seed)


def _load_state(
    config: Resolved, model: TrainedModel, optimizer: Optimizer, newest: Path | None
) -> tuple[Progress, list[BaseWeights]]:
    if newest is not None:
        return _resume(newest, model, optimizer)
    if not config.model.is_pretrained:
        return Progress(), []
    # Rank 0 decides: `model.path` may be a run that saves checkpoints meanwhile.
    (path, *_) = model.collectives.all_gather_values(str(weights_folder(config.model)))
    folder = Path(path)
    weights, base = open_pretrained(config.model, folder, model.collectives)
    # The base of another run's adapters is verified, but checkpoints of this run do not name it.
    bases = [] if base is None else [replace(base, is_recorded=False)]
    if not all(shard.trainable for shard in model.flat_shards()):
        bases.append(BaseWeights.new(folder, weights, model.collectives))
    load_weights(initial_weights(config.model, model.module, config.train.seed, weights), model)
    return Progress(), bases


def _resume(
    newest: Path, model: TrainedModel, optimizer: Optimizer
) -> tuple[Progress, list[BaseWeights]]:
    try:
        reader = CheckpointReader(newest)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{older_checkpoint_hint(newest)}") from None
    weights, base = open_with_base(reader, model.collectives)
    try:
        return load_into(reader, model, optimizer, weights), [base] if base is not None else []
    except CheckpointError as error:
        raise CheckpointError(f"{error}{older_checkpoint_hint(newest)}") from None
