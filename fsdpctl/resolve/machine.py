"""The ranks of a configuration on this machine or, for estimates, on a described cluster."""

import resource
from collections.abc import Mapping
from dataclasses import replace

import torch

from fsdpctl.chats.values import count_of
from fsdpctl.config.clusters import gpu_by_name
from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.schema import KEYS, Config, ConfigT, Origin, WithRanks
from fsdpctl.config.shorthands import RANK_KEYS
from fsdpctl.errors import UsageError
from fsdpctl.io.resources import host_memory, num_cores, threads_per_rank
from fsdpctl.plan.optimizers import MATRICES, MUON
from fsdpctl.plan.precision import TF32
from fsdpctl.plan.strategy import (
    FSDPCTL,
    STRATEGIES,
    Offload,
    Strategy,
    effective_strategy,
    engine_strategies,
)
from fsdpctl.resolve.attention_kernel import architecture_here
from fsdpctl.resolve.auto_values import AutoInputs, Stage, fill_auto, has_bf16
from fsdpctl.resolve.launchers import ESTIMATE_ROLE, LaunchRole

LOCAL = "local"
_GIB = 1 << 30
_FILES, _FILES_PER_RANK = 128, 16  # open files of a launcher, with a reserve
_CPU_RANKS = 2  # default ranks without a GPU; threads of the ranks use the other cores


def assign_ranks(
    config: Config, role: LaunchRole = ESTIMATE_ROLE, inputs: AutoInputs = AutoInputs()
) -> WithRanks:
    """Return a configuration with its device, ranks and dtypes.

    The ranks are those of `role` on this machine, or else those of `cluster`; then the memory of
    the cluster is filled in too. The host memory of another machine is unknown unless it is set.
    UsageError if this machine lacks the devices, or limits open files to too few.
    """
    config = with_cluster_ranks(config) if role.launch is None else _with_local_ranks(config, role)
    return WithRanks(fill_auto(config, Stage.RANKS, inputs))


def _with_local_ranks(config: Config, role: LaunchRole) -> Config:
    launch, has_cuda = role.launch, torch.cuda.is_available()
    assert launch is not None
    if launch.device == "cuda" and not has_cuda:
        has_support = torch.version.cuda or torch.version.hip
        why = "" if has_support else f" (torch {torch.__version__} is a CPU build)"
        problem = f"torch finds no CUDA device{why}; expected cpu or auto"
        raise UsageError(f"launch.device=cuda: {problem}")
    device = launch.device or ("cuda" if has_cuda else "cpu")
    available = torch.cuda.device_count() if device == "cuda" else None
    ranks = launch.nproc_per_node or local_ranks(device)
    # A launcher may make only one device visible to each rank.
    if available is not None and ranks > available and not (role.rank and available == 1):
        problem = f"expected at most {available}, the CUDA devices"
        raise UsageError(f"launch.nproc_per_node={ranks}: {problem}")
    raise_file_limit(ranks)
    return replace(config, launch=replace(launch, device=device, nproc_per_node=ranks))


def local_ranks(device: str = "auto") -> int:
    """Return the default number of ranks on this machine: one per CUDA device, or CPU ranks."""
    return (torch.cuda.device_count() if device != "cpu" else 0) or min(_CPU_RANKS, num_cores())


def num_ranks_of(settings: Mapping[str, str]) -> int:
    """Return the number of ranks that settings of `launch` and `cluster` give on a cluster."""
    pairs = (each for each in settings.items() if each[0].startswith(("launch.", "cluster")))
    return assign_ranks(compose_config([f"{name}={text}" for name, text in pairs]).config).num_ranks


def with_cluster_ranks(config: ConfigT) -> ConfigT:
    """Return a configuration with the ranks and the memory of `cluster`, unless they are set."""
    launch, cluster = config.launch, config.cluster
    is_gpu = torch.cuda.is_available() if cluster.name == LOCAL else cluster.name != "cpu"
    device = launch.device or ("cuda" if is_gpu or assumes_gpu(config) else "cpu")
    is_here = cluster.name in (LOCAL, "cpu") and (device == "cpu" or torch.cuda.is_available())
    devices = torch.cuda.device_count() if is_here and device == "cuda" else None
    default = local_ranks(device) if device == "cpu" else 1
    ranks = launch.nproc_per_node or cluster.ranks_per_node or devices or default
    memory = cluster.memory or _memory_here(device, ranks) / _GIB
    here = host_memory() / _GIB if is_here else None
    host = memory * ranks if device == "cpu" else here
    values = {
        "launch.device": device, "launch.nproc_per_node": ranks, "cluster.memory": memory,
        "cluster.host_memory": cluster.host_memory or host, "cluster.ranks_per_node": ranks,
        "cluster.architecture": cluster.architecture or (architecture_here() if devices else None),
    }  # fmt: skip
    return config.changed(values)


def without_other_cluster(composed: Composed) -> Composed:
    """Drop the recipe's cluster if it isn't this machine.

    UsageError if the command line sets such a cluster.
    """
    cluster, config = composed.cluster, composed.config
    device = config.launch.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = gpu_by_name(_machine(config)) if device == "cuda" else None
    # `device` is also the name of the cluster `cpu`.
    if cluster is None or config.cluster.name in (LOCAL, device, gpu and gpu.cluster):
        return composed
    if config.origins.get("cluster") is not Origin.RECIPE:
        raise UsageError(
            f"cluster={cluster}: this machine is {_machine(config)}; leave cluster out, or size "
            f"the run for that machine with fsdpctl estimate-memory cluster={cluster}"
        )
    described = [x for x in KEYS if x.startswith("cluster.") and not config.is_typed(x)]
    described += [name for name in RANK_KEYS if config.origin(name) is Origin.OPTION]
    config = config.changed({"cluster": LOCAL}, Origin.DEFAULT)
    for name in described:
        origin = Origin.AUTO if KEYS[name].auto else Origin.DEFAULT
        config = config.changed({name: KEYS[name].default}, origin)
    return replace(composed, config=config)


def role_of_dry_run(composed: Composed) -> LaunchRole:
    """Return the role of a dry run: the ranks of a cluster if the recipe is for its GPUs."""
    config, cluster = composed.config, composed.config.cluster
    is_for_gpus = config.launch.device == "cuda" and not config.is_typed("launch.device")
    is_described = cluster.name != LOCAL or cluster.memory is not None
    is_elsewhere = is_for_gpus and is_described and not torch.cuda.is_available()
    return LaunchRole(None if is_elsewhere else config.launch, is_dry=True)


def note_on_checked_cluster(placed: WithRanks) -> str:
    """Return a line with the cluster that a dry run without a GPU checks a recipe for."""
    cluster = placed.cluster
    return f"checked for cluster={cluster.name}, {cluster.memory:g} GiB per rank; no GPU is here"


def notes_on_cluster(composed: Composed) -> tuple[str, ...]:
    """Return a line if the recipe of a run describes another machine."""
    if composed.cluster in (None, LOCAL) or composed.config.cluster.name != LOCAL:
        return ()
    return (f"sized for {composed.cluster}; this machine is {_machine(composed.config)}",)


def _machine(config: Config) -> str:
    has_cuda = torch.cuda.is_available() and config.launch.device != "cpu"
    return torch.cuda.get_device_name(0) if has_cuda else f"a CPU of {num_cores()} cores"


def assumes_gpu(config: Config) -> bool:
    """Return whether an estimate assumes a GPU because only `cluster.memory` is set."""
    is_unnamed = config.cluster.name == LOCAL and not config.is_typed("cluster")
    is_described = is_unnamed and config.cluster.memory is not None
    return is_described and config.launch.device is None and not torch.cuda.is_available()


def notes_on_cores(config: Config) -> tuple[str, ...]:
    """Return a line if the ranks have more threads on this CPU than the CPU has cores."""
    launch, cores = config.launch, num_cores()
    ranks = launch.nproc_per_node or 1
    if (launch.device, launch.name, config.cluster.name) != ("cpu", LOCAL, LOCAL):
        return ()
    if (threads := threads_per_rank(ranks)) * ranks <= cores:
        return ()
    total = f"{count_of(ranks, 'rank')} x {count_of(threads, 'thread')}"
    note = f"{total} on {count_of(cores, 'core')} wait for one another"
    return (f"{note}; set launch.nproc_per_node or OMP_NUM_THREADS",)


def note_on_tf32(config: Config) -> str:
    """Return a line if TF32 would be faster, or if `precision=tf32` changes nothing here."""
    has_tf32 = config.launch.device != "cpu" and has_bf16()  # the same GPUs have both
    if config.precision.name == TF32:
        note = f"precision={TF32}: not supported by {_machine(config)}; matmuls are in float32"
        return "" if has_tf32 else note
    faster = f"matmuls are in float32; precision={TF32} is faster, with 10-bit mantissas"
    return faster if has_tf32 and config.precision.param_dtype == "float32" else ""


def raise_file_limit(ranks: int) -> None:
    """Raise a low limit of open files, which workers inherit; UsageError if the limit is fixed."""
    needed = _FILES + _FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"launch.nproc_per_node={ranks}: needs {needed} open files, but the limit is {hard}; "
            f"raise it with `ulimit -n {needed}`"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def notes_on_memory(config: Config) -> tuple[str, ...]:
    """Return a line about an assumed GPU."""
    if not assumes_gpu(config):
        return ()
    size = f"{config.cluster.memory:g} GiB"
    return (f"cluster.memory: a GPU of {size}, in bf16; for CPU ranks, set launch.device=cpu",)


def shares_memory(config: Config) -> bool:
    """Return whether the ranks of a configuration share memory."""
    return may_share_memory(config) and (config.launch.nproc_per_node or 1) > 1


def may_share_memory(config: Config) -> bool:
    """Return whether several ranks would share memory: the value of `launch.share_memory`."""
    launch, uses_fsdpctl = config.launch, config.engine.name == FSDPCTL
    on_one_host = launch.device == "cpu" and launch.nnodes == 1
    is_possible = on_one_host and uses_fsdpctl and Offload.PARAMS not in config.strategy.offloaded
    return launch.share_memory is not False and is_possible


def executed_strategy(config: Config, strategy: Strategy, size: int | None) -> tuple[Strategy, int]:
    """Return the strategy that ranks execute for the requested `strategy`, and its shard size.

    `size` is the number of ranks of a replica; None: all ranks.
    """
    ranks, offloads_params = config.num_ranks, Offload.PARAMS in config.strategy.offloaded
    options = {"shares_memory": shares_memory(config), "offloads_params": offloads_params}
    return effective_strategy(strategy, size or ranks, ranks, **options)


def owner_map_of(config: Config) -> str:
    """Return the owner map of a resolved configuration.

    With shared memory, no_shard runs as shard_optimizer and has an owner map too.
    """
    owners = config.strategy.owner_map or "even"
    cuts_matrices = owners == "even" and config.optimizer.name == MUON
    return MATRICES if cuts_matrices and shares_memory(config) else owners


def _memory_here(device: str, ranks: int) -> float:
    """Return the bytes of a GPU here; without a GPU, each rank's share of the host's memory."""
    if device == "cuda" and torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return host_memory() / ranks


def supported_strategies(config: Config) -> list[str]:
    """Return the strategies that the engine and the optimizer of a configuration support."""
    is_muon = config.optimizer.name == MUON
    offloads_params = Offload.PARAMS in config.strategy.offloaded
    strategies = {name: STRATEGIES[name] for name in engine_strategies(config.engine.name)}
    return [
        name
        for name, strategy in strategies.items()
        if not (is_muon and strategy.shards_params)
        if strategy.can_offload_params or not offloads_params
    ]
