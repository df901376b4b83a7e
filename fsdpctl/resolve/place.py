"""The place of a configuration: this machine or, for estimates, a specified cluster."""

from dataclasses import replace

import torch

from fsdpctl.config.recipe import known_gpu
from fsdpctl.config.schema import C, Config, Placed
from fsdpctl.errors import UsageError
from fsdpctl.io.control_group import host_memory
from fsdpctl.plan.optimizers import MATRICES, MUON
from fsdpctl.plan.strategy import (
    FSDPCTL,
    STRATEGIES,
    Offload,
    Strategy,
    effective_strategy,
    strategies_of,
)
from fsdpctl.resolve.launchers import Place
from fsdpctl.resolve.usual import OF_PLACE, filled

LOCAL = "local"
_GIB = 1 << 30
_CPU_RANKS = 2
# By CUDA's compute capability. GeForce cards of 12.x run Ada's kernels, not those of the B200.
_ARCHITECTURES = {
    (8, 0): "ampere", (8, 6): "ampere", (8, 7): "ampere", (8, 9): "ada", (9, 0): "hopper",
    (10, 0): "blackwell", (10, 3): "blackwell", (12, 0): "ada", (12, 1): "ada",
}  # fmt: skip


def place(config: Config, where: Place | None = None) -> Placed:
    """Return a configuration with its device, ranks and dtypes.

    The ranks are on this machine, as `where` has them, or else on `cluster`, which need not exist:
    then it has its memory too. The host memory of another machine is unknown unless it is set.

    Raises:
        UsageError: If this machine does not have the devices.
    """
    placed = on_cluster(config) if where is None else _here(config, where)
    return Placed(filled(placed, OF_PLACE))


def _here(config: Config, where: Place) -> Config:
    launch, place = where
    has_cuda = torch.cuda.is_available()
    if launch.device == "cuda" and not has_cuda:
        has_support = torch.version.cuda or torch.version.hip
        why = "" if has_support else f" (torch {torch.__version__} is a CPU build)"
        raise UsageError(
            f"launch.device=cuda: torch finds no CUDA device{why}; expected cpu or auto"
        )
    device = launch.device or ("cuda" if has_cuda else "cpu")
    available = torch.cuda.device_count() if device == "cuda" else None
    ranks = launch.nproc_per_node or ranks_here(device)
    # A launcher of ranks may make only its own device visible to each.
    if available is not None and ranks > available and not (place and available == 1):
        raise UsageError(
            f"launch.nproc_per_node={ranks}: expected at most {available}, the CUDA devices"
        )
    return replace(config, launch=replace(launch, device=device, nproc_per_node=ranks))


def ranks_here(device: str = "auto") -> int:
    """Return the ranks on this machine if none are set: one per CUDA device, or CPU ranks."""
    return (torch.cuda.device_count() if device != "cpu" else 0) or _CPU_RANKS


def on_cluster(config: C) -> C:
    """Return a configuration with the ranks and the memory of `cluster`, where it lacks them."""
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
    values = {
        "launch.device": device,
        "launch.nproc_per_node": ranks,
        "cluster.memory": memory,
        "cluster.host_memory": cluster.host_memory or in_host,
        "cluster.ranks_per_node": ranks,
        "cluster.architecture": cluster.architecture or (architecture_here() if found else None),
    }
    return config.changed(values)


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


def supported_strategies(config: Config) -> list[str]:
    """Return the strategies that the engine and the optimizer support."""
    is_muon = config.optimizer.name == MUON
    return [
        name
        for name in strategies_of(config.engine.name)
        if not (is_muon and STRATEGIES[name].shards_params)
        and (STRATEGIES[name].can_offload_params or Offload.PARAMS not in config.strategy.on_host)
    ]
