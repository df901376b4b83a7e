"""The one place where a configuration becomes objects."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.adapters import first_weights
from fsdpctl.checkpoint.base import base_info, check_base
from fsdpctl.checkpoint.folders import newest_checkpoint, way_on
from fsdpctl.checkpoint.load import load_checkpoint, load_weights
from fsdpctl.checkpoint.manifest import BaseInfo, Progress
from fsdpctl.checkpoint.pretrained import open_base, open_weights, weights_folder, whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.comm.collectives import ObjectExchange, collectives_for
from fsdpctl.comm.pulse import LOADING, PULSE
from fsdpctl.comm.world import World
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.chats.data import open_data
from fsdpctl.data.source import DataSet
from fsdpctl.engine.build import Source, divide_module
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.precision import Precision
from fsdpctl.engine.shard import Sharding, shard_from
from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.models.registry import build_model, initialize_parameter
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.peers.model import peer_model
from fsdpctl.peers.setup import PeerSetup
from fsdpctl.plan.batch import BatchPlan, plan_batches
from fsdpctl.plan.engines import OURS
from fsdpctl.plan.schedule import Prefetch
from fsdpctl.plan.strategy import get_strategy, ranks_per_copy
from fsdpctl.resolve.blocks import checkpoint_block, compile_block
from fsdpctl.shards import TrainedModel
from fsdpctl.train.loop import Trainer
from fsdpctl.train.parts import Optimizer, Outside, TrainingParts
from fsdpctl.train.run_watch import RunWatch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_model(
    config: Config, device: torch.device, *, strategy: str | None = None, empty: bool = False
) -> ShardedModel:
    """The model, sharded by our engine as the configuration says. Collective.

    With its weights drawn from the seed, or `empty` with zeros, to be filled.
    """
    given = config.strategy.under(strategy) if strategy else config.strategy
    sharding = Sharding(
        given.name,
        dp_shard_size=given.dp_shard_size,
        owner_map=given.owner_map,
        prefetch=Prefetch(config.prefetch.forward, config.prefetch.backward),
        precision=Precision(*(_DTYPES[name or "float32"] for name in config.precision.dtypes)),
    )
    source = Source(device, is_empty=True) if empty else Source(device, _draw(config))
    return shard_from(source, make_module(config), sharding)


def make_trained_model(config: Config, device: torch.device, *, empty: bool) -> TrainedModel:
    """The same in the hands of the engine that the configuration names. Collective."""
    if config.engine.name == OURS:
        model = make_model(config, device, empty=empty)
        model.mesh.measure_waits()
        model.overlap_param_gather = True
        return model
    module, strategy = make_module(config), get_strategy(config.strategy.name)
    ranks = collectives_for(device).size
    setup = PeerSetup(
        config.engine.name,
        tuple(unit.name for unit in divide_module(module, None) if unit.kind == "block"),
        ranks_per_copy(strategy, ranks, config.strategy.dp_shard_size),
        reshards=strategy.reshard_after_forward,
        prefetch=Prefetch(config.prefetch.forward, config.prefetch.backward),
        param_dtype=_DTYPES[str(config.precision.param_dtype)],
        reduce_dtype=_DTYPES[str(config.precision.reduce_dtype)],
        master_dtype=_DTYPES[str(config.precision.master_dtype)],
        compiles=config.train.compile,
    )
    return peer_model(module, setup, device, None if empty else _draw(config))


def _draw(config: Config) -> Callable[[str, Tensor], None]:
    """What gives a parameter its first values, and shows the launcher that this rank gets on."""

    def draw(name: str, whole: Tensor) -> None:
        PULSE.at(LOADING)
        initialize_parameter(name, whole, seed=config.train.seed, config=config.model)

    return draw


def make_module(config: Config) -> nn.Module:
    """The module without values, its blocks recomputed and compiled as configured."""
    module = build_model(config.model)
    for unit in divide_module(module, None):
        if unit.kind == "block":
            block = module.get_submodule(unit.name)
            if config.activation_checkpointing.name != "none":
                checkpoint_block(block, config.activation_checkpointing.name)
            if config.train.compile:
                compile_block(block)
    return module


def make_optimizer(config: Config, model: TrainedModel) -> Optimizer:
    """The optimizer over the model's shards."""
    about = config.optimizer
    if about.name == "sgd":
        return ShardedSGD(
            model, lr=about.lr or 0.0, momentum=about.momentum, weight_decay=about.weight_decay
        )
    return ShardedAdamW(
        model,
        lr=about.lr or 0.0,  # the trainer sets it before every step
        betas=(about.beta1, about.beta2),
        eps=about.eps,
        weight_decay=about.weight_decay,
    )


def make_trainer(
    config: Config, world: World, outside: Outside, *, shows: bool, lines: tuple[str, ...] = ()
) -> Trainer:
    """Everything for a run, brought to where its newest checkpoint was. Collective.

    Args:
        config: resolved.
        world: the ranks.
        outside: who asks for an end, and since when this runs.
        shows: whether rank 0 shows the progress, and tells others of it.
        lines: what it prints first.
    """
    run_dir = Path(str(config.train.run_dir))
    watch = RunWatch(config, run_dir, ObjectExchange(), world.device, is_on=shows)
    with watch.keeping_snapshot():
        return _make_trainer(config, world, outside, watch, shows=shows, lines=lines)


def _make_trainer(
    config: Config,
    world: World,
    outside: Outside,
    watch: RunWatch,
    *,
    shows: bool,
    lines: tuple[str, ...],
) -> Trainer:
    run_dir, data = watch.run_dir, _data(config)
    plan = plan_batches(
        config.train.global_batch_size,
        world.world_size,
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
    )
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    is_read = newest is not None or config.model.is_pretrained
    model = make_trained_model(config, world.device, empty=is_read)
    optimizer = make_optimizer(config, model)
    done, base = _fill(config, model, optimizer, data, newest)
    _meet(watch)
    train = config.train
    parts = TrainingParts(
        config=config,
        run_dir=run_dir,
        data=data,
        model=model,
        optimizer=optimizer,
        train_batches=Batches(data.train.rows(train.seq_len), plan, train.seed, data.vocab_size),
        val_batches=_validation(data, train.seq_len, plan),
        device=world.device,
        outside=outside,
        watch=watch,
        shows=shows,
        lines=lines,
        base=base,
    )
    return Trainer(parts, done)


def _meet(watch: RunWatch) -> None:
    """All ranks have read: the slowest may take longer than NCCL waits in a first collective."""
    watch.ranks.gather_objects(None)
    PULSE.at("ready")


def _data(config: Config) -> DataSet:
    """The data, read once on each node: what it was made into is in a cache then. Collective."""
    ranks, is_first = ObjectExchange(), int(os.environ.get("LOCAL_RANK", 0)) == 0
    data = open_data(config.data, config.train.seed) if is_first else None
    if config.data.holds_documents:
        ranks.gather_objects(None)
    return data or open_data(config.data, config.train.seed)


def _fill(
    config: Config,
    model: TrainedModel,
    optimizer: Optimizer,
    data: DataSet,
    newest: Path | None,
) -> tuple[Progress, BaseInfo | None]:
    """Read what the model begins with, where that is not drawn.

    Returns how far the run had come, and what has the weights that its checkpoints leave out.
    """
    if newest is not None:
        return _resume(newest, model, optimizer, data)
    if not config.model.is_pretrained:
        return Progress(), None
    # Decided once: `model.path` may be a run that goes on while the ranks look.
    (found, *_) = model.collectives.gather_objects(str(weights_folder(config.model)))
    folder = Path(found)
    weights = open_weights(config.model, folder)
    load_weights(first_weights(config.model, model.module, config.train.seed, weights), model)
    trains_all = all(shard.trainable for shard in model.flat_shards())
    return Progress(), None if trains_all else base_info(folder, weights, model.collectives)


def _validation(data: DataSet, seq_len: int, plan: BatchPlan) -> Batches | None:
    return None if data.val is None else Batches(data.val.rows(seq_len), plan, 0, data.vocab_size)


def _resume(
    newest: Path, model: TrainedModel, optimizer: Optimizer, data: DataSet
) -> tuple[Progress, BaseInfo | None]:
    try:
        reader = CheckpointReader(newest)
        if reader.manifest.progress.data_fingerprint not in ("", data.fingerprint):
            raise UsageError(
                f"train.run_dir={newest.parent.parent}: the data is not what the run was trained "
                "on so far; choose another train.run_dir="
            )
    except CheckpointError as error:
        raise CheckpointError(f"{error}{way_on(newest)}") from None
    base = reader.manifest.base
    if base is not None:
        check_base(base, open_base(base, reader), model.collectives, str(reader))
    weights = whole_weights(reader)
    try:
        return load_checkpoint(reader, model, optimizer, weights), base
    except CheckpointError as error:
        raise CheckpointError(f"{error}{way_on(newest)}") from None
