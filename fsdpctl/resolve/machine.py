"""Place a configuration on this machine or, for estimates, on a specified cluster."""

from dataclasses import replace

import torch

from fsdpctl.config.recipe import known_gpu
from fsdpctl.config.schema import Config, PrecisionConfig, StrategyConfig
from fsdpctl.errors import UsageError
from fsdpctl.io.control_group import host_memory
from fsdpctl.plan.optimizers import MATRICES, MUON
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.strategy import (
    FSDPCTL,
    STRATEGIES,
    Offload,
    Strategy,
    effective_strategy,
    get_strategy,
    ranks_per_replica,
    strategies_of,
)
from fsdpctl.resolve.launchers import Place, place_of

LOCAL = "local"
_GIB = 1 << 30
_CPU_RANKS = 2
# By CUDA's compute capability. GeForce cards of 12.x run Ada's kernels, not those of the B200.
_ARCHITECTURES = {
    (8, 0): "ampere", (8, 6): "ampere", (8, 7): "ampere", (8, 9): "ada", (9, 0): "hopper",
    (10, 0): "blackwell", (10, 3): "blackwell", (12, 0): "ada", (12, 1): "ada",
}  # fmt: skip


def placed_here(config: Config, where: Place | None = None) -> Config:
    """Fill in device and ranks for this machine, from `where` or the launcher's variables."""
    launch, place = where or place_of(config.launch)
    has_cuda = torch.cuda.is_available()
    if launch.device == "cuda" and not has_cuda:
        raise UsageError("launch.device=cuda: torch finds no CUDA device; expected cpu or auto")
    device = launch.device or ("cuda" if has_cuda else "cpu")
    available = torch.cuda.device_count() if device == "cuda" else None
    ranks = launch.nproc_per_node or available or _CPU_RANKS
    # A launcher of ranks may make only its own device visible to each.
    if available is not None and ranks > available and not (place and available == 1):
        raise UsageError(
            f"launch.nproc_per_node={ranks}: expected at most {available}, the CUDA devices"
        )
    return _with_precision(
        replace(config, launch=replace(launch, device=device, nproc_per_node=ranks))
    )


def placed_on_cluster(config: Config) -> Config:
    """Fill in device, ranks and memory for `cluster`, which need not exist.

    The host memory of another machine is unknown unless it is set.
    """
    launch, cluster = config.launch, config.cluster
    here = cluster.name in (LOCAL, "cpu")
    has_cuda = torch.cuda.is_available() if cluster.name == LOCAL else not here
    device = launch.device or ("cuda" if has_cuda else "cpu")
    found = torch.cuda.device_count() if here and device == "cuda" else None
    ranks = launch.nproc_per_node or cluster.ranks_per_node or found or _CPU_RANKS
    memory = cluster.memory or _memory_here(device, ranks) / _GIB
    if device == "cpu":
        in_host: float | None = memory * ranks
    else:
        in_host = host_memory() / _GIB if here else None
    placed = replace(
        config,
        launch=replace(launch, device=device, nproc_per_node=ranks),
        cluster=replace(
            cluster,
            memory=memory,
            host_memory=cluster.host_memory or in_host,
            ranks_per_node=ranks,
            architecture=cluster.architecture or (architecture_here() if found else None),
        ),
    )
    return _with_precision(placed)


def notes_on_cluster(config: Config) -> tuple[str, ...]:
    """Return a line if `cluster` is not the hardware of a configuration that is placed here."""
    name, device = config.cluster.name, str(config.launch.device)
    gpu = known_gpu(torch.cuda.get_device_name(0)) if device == "cuda" else None
    if name in (LOCAL, device) or (gpu and gpu.cluster == name):
        return ()
    return (f"cluster={name}: no effect on a run here, which uses {device}; estimates assume it",)


def architecture_here() -> str | None:
    """Return the generation of this machine's first GPU, if its attention kernels are known."""
    return _ARCHITECTURES.get(torch.cuda.get_device_capability(0))


def with_architecture(config: Config) -> Config:
    """`config`, placed here, with the generation of this machine's GPUs."""
    if config.launch.device != "cuda":
        return config
    return replace(config, cluster=replace(config.cluster, architecture=architecture_here()))


def with_batch_size(config: Config) -> Config:
    """Convert the size of a step from tokens to samples, if it is set in tokens."""
    train = config.train
    if train.global_batch_tokens is None:
        return config
    size = train.global_batch_tokens // train.seq_len
    if size == 0:
        raise UsageError(
            f"train.global_batch_tokens={train.global_batch_tokens}: fewer than the "
            f"train.seq_len={train.seq_len} of one sample"
        )
    return replace(config, train=replace(train, global_batch_size=size, global_batch_tokens=None))


def shares_memory(config: Config) -> bool:
    """Return whether the ranks of a placed configuration share the memory of one machine."""
    return may_share_memory(config) and (config.launch.nproc_per_node or 1) > 1


def may_share_memory(config: Config) -> bool:
    """Return whether any number of ranks would share memory: `launch.share_memory`, resolved."""
    launch, is_ours = config.launch, config.engine.name == FSDPCTL
    on_one_host = launch.device == "cpu" and launch.nnodes == 1
    is_possible = on_one_host and is_ours and Offload.PARAMS not in config.strategy.on_host
    return launch.share_memory is not False and is_possible


def strategy_that_runs(config: Config, row: Strategy, size: int | None) -> tuple[Strategy, int]:
    """Return what the strategy `row` of a placed configuration is on its ranks, and its shard size.

    `size` ranks share a replica; None: all.
    """
    ranks = config.num_ranks
    return effective_strategy(
        row,
        size or ranks,
        ranks,
        shares_memory=shares_memory(config),
        offloads_params=Offload.PARAMS in config.strategy.on_host,
    )


def owner_map_of(config: Config) -> str:
    """Return the owner map of a resolved configuration; shared memory gives no_shard one."""
    owners = config.strategy.owner_map or "even"
    cuts_matrices = owners == "even" and config.optimizer.name == MUON
    return MATRICES if cuts_matrices and shares_memory(config) else owners


def _memory_here(device: str, ranks: int) -> float:
    if device == "cuda" and torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return host_memory() / ranks


def _with_precision(config: Config) -> Config:
    given = config.precision
    on_cuda = config.launch.device == "cuda"
    # Cards that only emulate bf16, V100 and T4, are many times slower with it.
    bf16 = on_cuda and (
        not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    )
    is_split = given.master_dtype == SPLIT  # of which the bf16 half is gathered
    param_dtype = given.param_dtype or ("bfloat16" if bf16 or is_split else "float32")
    if is_split and param_dtype != "bfloat16":
        raise UsageError(
            f"precision.master_dtype={SPLIT}: requires precision.param_dtype=bfloat16, got "
            f"{param_dtype}"
        )
    precision = PrecisionConfig(
        given.name, param_dtype, given.reduce_dtype or "float32", given.master_dtype or "float32"
    )
    return replace(config, precision=precision)


def supported_strategies(config: Config) -> list[str]:
    """Return the strategies that the engine and the optimizer support."""
    is_muon = config.optimizer.name == MUON
    return [
        name
        for name in strategies_of(config.engine.name)
        if not (is_muon and STRATEGIES[name].shards_params)
        and (STRATEGIES[name].can_offload_params or Offload.PARAMS not in config.strategy.on_host)
    ]


def resolved_strategy(config: Config) -> StrategyConfig:
    """Return the strategy with its sizes filled in for a placed configuration."""
    given = config.strategy
    row, ranks = get_strategy(given.name), config.num_ranks
    usual = MATRICES if config.optimizer.name == MUON else "even"
    owners = given.owner_map or (usual if row.has_owner_map else "even")
    if owners != "even" and not row.has_owner_map:
        raise UsageError(
            f"strategy.owner_map={owners}: only valid with strategy=shard_optimizer, got "
            f"strategy={row.name}"
        )
    asked = given.dp_shard_size
    if row.replicates and asked is None:
        asked = config.launch.nproc_per_node
    size = ranks_per_replica(row, ranks, asked)
    return replace(given, dp_shard_size=size if row.replicates else None, owner_map=owners)
