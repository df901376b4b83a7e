"""The rank of this process, from the environment variables of a launcher such as torchrun.

If the variables contradict `launch`, the command fails: a rank started as a single process would
train a second copy of the model.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdpctl.config.launch import LaunchConfig
from fsdpctl.errors import UsageError

# Variables that launchers set for ranks, for tasks, and for nodes.
_RANKS = ("RANK", "LOCAL_RANK")
_TASKS = {
    "WORLD_SIZE": "set launch=env",
    "SLURM_STEP_NUM_TASKS": "set launch=slurm",
    "OMPI_COMM_WORLD_SIZE": "mpirun is not supported; use torchrun with launch=env",
}
_NODES = ("SKYPILOT_NUM_NODES", "PET_NNODES")
_ENV_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STEP_NAMES = ("NUM_TASKS", "NUM_NODES", "NODELIST", "TASKS_PER_NODE")
_UNIFORM_TASKS = re.compile(r"\d+(\(x\d+\))?")  # equal numbers of tasks, such as 8 or 8(x4)
_ENDPOINT = re.compile(
    r"(\[(?P<address>[0-9A-Fa-f:.]+(%[\w.-]+)?)\]|(?P<host>[^][:]+)):(?P<port>[0-9]{1,5})"
)
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the ephemeral ports


@dataclass(frozen=True, slots=True)
class LauncherRank:
    """The rank of a process that another launcher has started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str  # host name or IP address of rank 0
    port: int
    restarts: int = 0  # restarts of all ranks by the launcher
    has_store: bool = False  # whether the launcher serves the store at this port; else rank 0 does


@dataclass(frozen=True, slots=True)
class LaunchRole:
    """The role of this process: a launcher, a rank, or an estimate of a described cluster."""

    launch: LaunchConfig | None  # has the launcher's number of nodes; None: an estimate
    rank: LauncherRank | None = None  # this process, if another launcher has started it
    is_dry: bool = False  # a dry run opens data and model, but fetches no weights

    @property
    def is_here(self) -> bool:
        """Whether the ranks are on this machine."""
        return self.launch is not None

    @property
    def starts_all_ranks(self) -> bool:
        return self.rank is None and self.launch is not None and self.launch.nnodes == 1


ESTIMATE_ROLE = LaunchRole(None)


def role_of(
    launch: LaunchConfig, environ: Mapping[str, str] = os.environ, *, tasks_are_ranks: bool = False
) -> LaunchRole:
    """Return the role of this process, with the nodes of its launcher.

    `are_ranks`: Slurm's tasks are ranks, even one per node. UsageError if the variables
    are missing, contradict `launch`, or belong to another launcher.
    """
    rank = None
    if launch.name == "env":
        rank = _rank_from_env(launch, environ)
    elif launch.name == "slurm":
        launch, rank = _rank_from_slurm(launch, environ, tasks_are_ranks=tasks_are_ranks)
    else:
        _check_alone(launch, environ)
    if rank is None:
        _require_rendezvous(launch)
        return LaunchRole(launch)
    ranks = rank.local_world_size
    if launch.nproc_per_node not in (None, ranks):
        problem = f"the launcher has started {ranks} rank{'s' * (ranks > 1)} on this node"
        raise UsageError(f"launch.nproc_per_node={launch.nproc_per_node}: {problem}")
    nodes = rank.world_size // ranks
    _check_node_count(launch, nodes, "the launcher has started ranks on")
    return LaunchRole(replace(launch, nproc_per_node=ranks, nnodes=nodes), rank)


def role_of_script(launch: LaunchConfig, environ: Mapping[str, str] = os.environ) -> LaunchRole:
    """Return the role of a script: a rank of torchrun or srun, or else the only one.

    Raises as `role_of`.
    """
    name = launch.name
    if name == "local" and _RANKS[0] in environ:
        name = "env"
    elif name == "local" and _above_one("SLURM_STEP_NUM_TASKS", environ):
        name = "slurm"
    if name != "local":
        return role_of(replace(launch, name=name), environ, tasks_are_ranks=True)
    _check_alone(launch, environ)
    count = (launch.nproc_per_node or 1) * launch.nnodes
    if count > 1 or launch.node_rank or launch.rdzv_endpoint:
        raise UsageError(
            f"launch.nproc_per_node={launch.nproc_per_node or 1} launch.nnodes={launch.nnodes}: a "
            f"script is one rank; start one process per rank, such as with torchrun "
            f"--nproc-per-node {launch.nproc_per_node or 2} SCRIPT"
        )
    only_rank = LauncherRank(0, 1, 0, 1, address="", port=0)
    return LaunchRole(replace(launch, nproc_per_node=1), only_rank)


def _require_rendezvous(launch: LaunchConfig) -> None:
    nodes, node = launch.nnodes, launch.node_rank
    check_nodes(launch)
    if nodes > 1 and (node is None or launch.rdzv_endpoint is None):
        raise UsageError(
            f"launch.nnodes={nodes}: run the command on each node, with launch.node_rank=0 to "
            f"{nodes - 1}, and launch.rdzv_endpoint=HOST:PORT of node 0"
        )


def check_nodes(launch: LaunchConfig) -> None:
    """Check `launch.node_rank` and `launch.rdzv_endpoint` if they are set."""
    nodes, node = launch.nnodes, launch.node_rank
    if launch.rdzv_endpoint is not None:
        host_and_port(launch.rdzv_endpoint)
    if launch.name == "local" and nodes == 1 and (node or launch.rdzv_endpoint):
        problem = "require several nodes; set launch.nnodes to the number of nodes"
        raise UsageError(f"launch.node_rank and launch.rdzv_endpoint: {problem}")
    if nodes > 1 and node is not None and node >= nodes:
        problem = f"expected 0 to {nodes - 1} with launch.nnodes={nodes}"
        raise UsageError(f"launch.node_rank={node}: {problem}")


def _check_node_count(launch: LaunchConfig, nodes: int, cause: str) -> None:
    if launch.nnodes not in (1, nodes):
        raise UsageError(f"launch.nnodes={launch.nnodes}: {cause} {nodes}")


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not text.isdecimal():
        raise UsageError(f"{name}={text:.40}: expected a number")
    return int(text)


def _above_one(name: str, environ: Mapping[str, str]) -> bool:
    text = environ.get(name, "")
    return text.isdecimal() and int(text) > 1


def _check_alone(launch: LaunchConfig, environ: Mapping[str, str]) -> None:
    for name in _RANKS:
        if name in environ:
            raise UsageError(
                f"launch=local: started as one of several processes ({name}={environ[name]}), as "
                "by torchrun, but launch=local starts the ranks itself; set launch=env, or unset "
                f"{name} and run the command once"
            )
    for name, next_step in _TASKS.items():
        if _above_one(name, environ):
            problem = f"started as one of several processes ({name}={environ[name]}); {next_step}"
            raise UsageError(f"launch=local: {problem}")
    for name in _NODES:
        if launch.nnodes == 1 and _above_one(name, environ):
            raise UsageError(
                f"launch.nnodes=1: this is one of several nodes ({name}={environ[name]}); set "
                f"launch.nnodes={environ[name]}, with launch.node_rank and launch.rdzv_endpoint"
            )


def _rank_from_env(launch: LaunchConfig, environ: Mapping[str, str]) -> LauncherRank:
    missing = [name for name in _ENV_NAMES if not environ.get(name)]
    if missing:
        raise UsageError(
            f"launch=env: {', '.join(missing)} not set; start one process per rank with another "
            "launcher, such as `torchrun -m fsdpctl train launch=env`"
        )
    _reject_node_rank(launch, "launch=env")
    rank, world, local, ranks = (_number(name, environ) for name in _ENV_NAMES[:4])
    is_consistent = 0 <= local < ranks <= world and rank < world
    if not is_consistent or world % ranks or rank % ranks != local:
        raise UsageError(
            f"launch=env: RANK={rank} of WORLD_SIZE={world} and LOCAL_RANK={local} of "
            f"LOCAL_WORLD_SIZE={ranks} are inconsistent; expected consecutive ranks on every node, "
            "and the same number on each"
        )
    restarts = "TORCHELASTIC_RESTART_COUNT"
    return LauncherRank(
        rank, world, local, ranks,
        address=environ["MASTER_ADDR"].strip("[]"),
        port=_number("MASTER_PORT", environ),
        restarts=_number(restarts, environ) if restarts in environ else 0,
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


def _reject_node_rank(launch: LaunchConfig, option: str) -> None:
    if launch.node_rank is not None:
        problem = f"not supported with {option}, which reads it from the launcher"
        raise UsageError(f"launch.node_rank={launch.node_rank}: {problem}")


def _rank_from_slurm(
    launch: LaunchConfig, environ: Mapping[str, str], *, tasks_are_ranks: bool
) -> tuple[LaunchConfig, LauncherRank | None]:
    if any(f"SLURM_STEP_{name}" not in environ for name in _STEP_NAMES):
        raise UsageError(
            "launch=slurm: not in a job step; run the command with srun, one task per node or one "
            "per rank: `srun fsdpctl train launch=slurm`"
        )
    if "SLURM_HET_SIZE" in environ:
        raise UsageError("launch=slurm: heterogeneous jobs are not supported")
    _reject_node_rank(launch, "launch=slurm")
    tasks, nodes = (_number(f"SLURM_STEP_{name}", environ) for name in _STEP_NAMES[:2])
    _check_node_count(launch, nodes, "Slurm has started the step on")
    per_node = environ["SLURM_STEP_TASKS_PER_NODE"]
    if not _UNIFORM_TASKS.fullmatch(per_node) or tasks % nodes:
        problem = "expected the same number of tasks on every node; set srun --ntasks-per-node="
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={per_node}: {problem}")
    names = ("PROCID", "NODEID", "LOCALID")
    task, node, local = (_number(f"SLURM_{name}", environ) for name in names)
    if task != node * (tasks // nodes) + local:
        problem = "expected consecutive tasks on every node; set srun -m block"
        raise UsageError(f"SLURM_PROCID={task}: {problem}")
    endpoint = launch.rdzv_endpoint
    if endpoint is None:  # the port is equal in all tasks of the step, rarely that of another step
        job, step = (_number(f"SLURM_{name}_ID", environ) for name in ("JOB", "STEP"))
        endpoint = f"{first_host(environ)}:{_FIRST_PORT + (7 * job + step) % _NUM_PORTS}"
    if tasks == nodes and not tasks_are_ranks:
        node_rank, endpoint = (node, endpoint) if nodes > 1 else (None, None)
        return replace(launch, nnodes=nodes, node_rank=node_rank, rdzv_endpoint=endpoint), None
    return launch, LauncherRank(task, tasks, local, tasks // nodes, *host_and_port(endpoint))


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT or [IPV6]:PORT; UsageError if it's another text."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        problem = "expected HOST:PORT of node 0, such as 10.0.0.1:29500 or [fd00::1]:29500"
        raise UsageError(f"launch.rdzv_endpoint={endpoint}: {problem}")
    return match["address"] or match["host"], int(match["port"])


def endpoint_of(host: str, port: int) -> str:
    """Return HOST:PORT, with the host in brackets if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def first_host(environ: Mapping[str, str]) -> str:
    """Return the first node of a Slurm step, such as gpu-a003 for `gpu-a[003-005,9],b1`."""
    listed = environ["SLURM_STEP_NODELIST"]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", listed).split(",")[0]
