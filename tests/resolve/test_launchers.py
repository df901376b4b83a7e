"""The roles that follow from variables of other launchers, and the refused variables."""

from dataclasses import replace

import pytest

from fsdpctl.config.launch import LaunchConfig
from fsdpctl.errors import UsageError
from fsdpctl.resolve.launchers import LauncherRank, LaunchRole, first_host, role_of, role_of_script

LOCAL, ENV, SLURM = LaunchConfig(), LaunchConfig("env"), LaunchConfig("slurm")


def of_torchrun(rank: int, world: int, ranks: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", **more,
    }  # fmt: skip


def of_slurm(task: int, tasks: int, nodes: int, **more: str) -> dict[str, str]:
    each = tasks // nodes
    return {
        "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": "gpu-a[003-005,9],b1",
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else str(each),
        "SLURM_PROCID": str(task), "SLURM_NODEID": str(task // each),
        "SLURM_LOCALID": str(task % each), **more,
    }  # fmt: skip


def refused(launch: LaunchConfig, environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        role_of(launch, environ)
    return str(caught.value)


def node_of(role: LaunchRole) -> LaunchConfig:
    assert role.launch is not None
    return role.launch


def test_a_process_alone_starts_its_ranks_itself():
    assert role_of(LOCAL, {}) == LaunchRole(LOCAL)
    assert role_of(LOCAL, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == LaunchRole(LOCAL)


@pytest.mark.parametrize(("environ", "named"), [
    ({"RANK": "0"}, "launch=env"), ({"LOCAL_RANK": "1"}, "launch=env"),
    ({"SLURM_STEP_NUM_TASKS": "4"}, "launch=slurm"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun is not supported"),
    ({"SKYPILOT_NUM_NODES": "2"}, "launch.nnodes=2"), ({"PET_NNODES": "3"}, "launch.nnodes=3"),
])  # fmt: skip
def test_launch_local_is_rejected_under_another_launcher(environ, named):
    assert named in refused(LOCAL, environ)


def test_torchruns_variables_determine_the_rank():
    role = role_of(ENV, of_torchrun(5, 8, 4, TORCHELASTIC_USE_AGENT_STORE="True"))
    launch, rank = node_of(role), role.rank
    assert rank == LauncherRank(5, 8, 1, 4, "10.0.0.1", 29500, has_store=True)
    assert (launch.nproc_per_node, launch.nnodes) == (4, 2)


def test_env_needs_all_variables_that_a_rank_has():
    # Some operators set RANK to the number of a node.
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert "LOCAL_RANK, LOCAL_WORLD_SIZE not set" in refused(ENV, environ)


@pytest.mark.parametrize("wrong", [
    {"WORLD_SIZE": "6"},  # not a multiple of the four ranks of a node
    {"LOCAL_RANK": "2"},  # ranks of a node are not consecutive
    {"RANK": "8"},
    {"LOCAL_WORLD_SIZE": "16"},
])  # fmt: skip
def test_inconsistent_variables_are_rejected(wrong):
    assert "are inconsistent" in refused(ENV, of_torchrun(5, 8, 4) | wrong)


def test_a_variable_that_is_not_a_number_is_named():
    environ = of_torchrun(0, 2, 2) | {"WORLD_SIZE": "two"}
    assert refused(ENV, environ) == "WORLD_SIZE=two: expected a number"


def test_a_wrong_number_of_nodes_or_ranks_is_rejected():
    message = refused(LaunchConfig("env", nnodes=2), of_torchrun(0, 2, 2))
    assert "launch.nnodes=2: the launcher has started ranks on 1" in message
    message = refused(LaunchConfig("slurm", nnodes=3), of_slurm(0, 2, 2))
    assert "nnodes=3: Slurm has started the step on 2" in message
    message = refused(LaunchConfig("env", nproc_per_node=8), of_torchrun(0, 4, 4))
    assert "nproc_per_node=8: the launcher has started 4" in message


def test_one_task_per_node_is_a_launcher():
    role = role_of(SLURM, of_slurm(1, 2, 2))
    launch, rank = node_of(role), role.rank
    assert (rank, (launch.nnodes, launch.node_rank)) == (None, (2, 1))
    assert launch.rdzv_endpoint == f"gpu-a003:{20000 + 7 * 1234}"
    launch = LaunchConfig("slurm", rdzv_endpoint="10.0.0.9:29500")
    assert node_of(role_of(launch, of_slurm(1, 2, 2))).rdzv_endpoint == "10.0.0.9:29500"


def test_one_task_per_rank_is_a_rank():
    role = role_of(SLURM, of_slurm(3, 4, 2))
    launch, rank = node_of(role), role.rank
    assert rank == LauncherRank(3, 4, 1, 2, "gpu-a003", 20000 + 7 * 1234)
    assert (launch.nnodes, launch.nproc_per_node) == (2, 2)


def test_a_script_is_a_rank_of_any_launcher_or_the_only_one():
    assert role_of_script(LOCAL, of_torchrun(5, 8, 4)) == role_of(ENV, of_torchrun(5, 8, 4))
    role = role_of_script(LOCAL, of_slurm(1, 2, 2))  # one task per node
    launch, rank = node_of(role), role.rank
    assert rank == LauncherRank(1, 2, 0, 1, "gpu-a003", 20000 + 7 * 1234)
    assert (launch.nnodes, launch.nproc_per_node) == (2, 1)
    assert role_of_script(LOCAL, {}).rank == LauncherRank(0, 1, 0, 1, "", 0)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 4 SCRIPT"):
        role_of_script(LaunchConfig(nproc_per_node=4), {})


def test_one_task_alone_starts_its_ranks_itself_under_slurm_too():
    role = role_of(SLURM, of_slurm(0, 1, 1))
    launch, rank = node_of(role), role.rank
    assert (rank, (launch.nnodes, launch.node_rank)) == (None, (1, None))


def test_unsupported_job_steps_are_rejected():
    outside = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}  # as in a batch script
    assert "run the command with srun" in refused(SLURM, outside)
    assert "heterogeneous" in refused(SLURM, of_slurm(0, 2, 2) | {"SLURM_HET_SIZE": "2"})
    assert "srun -m block" in refused(SLURM, of_slurm(1, 4, 2) | {"SLURM_NODEID": "1"})
    uneven = of_slurm(0, 3, 3) | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}
    assert "the same number of tasks" in refused(SLURM, uneven)
    assert "launch.node_rank=1" in refused(LaunchConfig("slurm", node_rank=1), of_slurm(1, 2, 2))


@pytest.mark.parametrize(("listed", "first"), [
    ("n[1-2]", "n1"), ("gpu-a[003-005,9],b1", "gpu-a003"), ("a,b", "a"),
    ("rack[2,4]-node[07-08]", "rack2-node07"), ("single", "single"), ("n[12]", "n12"),
])  # fmt: skip
def test_the_first_host_of_a_list(listed, first):
    assert first_host({"SLURM_STEP_NODELIST": listed}) == first


@pytest.mark.parametrize(("allocator", "grows"), [("expandable", "True"), ("native", "False")])
def test_a_rank_of_any_launcher_gets_its_allocator_and_its_cores(monkeypatch, allocator, grows):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr("fsdpctl.config.launch.threads_per_rank", lambda ranks: 8 // ranks)
    threads = {"OMP_NUM_THREADS": "4"}
    on_cpu = {"THP_MEM_ALLOC_ENABLE": "1", **threads}
    on_cuda = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{grows}", **threads}
    launch = LaunchConfig(allocator=allocator)

    def of(device: str | None) -> dict[str, str]:
        return replace(launch, device=device).rank_environment(2)

    assert (of("cuda"), of("cpu")) == (on_cuda, on_cpu)
    assert of(None) == on_cpu | on_cuda  # a rank of another launcher selects its device later
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert of("cuda") == threads
