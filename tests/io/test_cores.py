"""Cores, ranks and threads of all kinds of hosts, from imitated system files."""

import resource

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.launch import LaunchConfig
from fsdpctl.engine.host_worker import host_cpus
from fsdpctl.errors import UsageError
from fsdpctl.io import resources
from fsdpctl.resolve.launchers import LaunchRole
from fsdpctl.resolve.machine import assign_ranks, notes_on_cores

V1 = {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    def imitate(allowed, threads_per_core=1, files=(), machine=192, **environ):
        for number in allowed:
            first = number % (machine // threads_per_core)
            all_of = range(first, machine, machine // threads_per_core)
            file = tmp_path / f"cpus/cpu{number}/topology/thread_siblings_list"
            file.parent.mkdir(parents=True)
            file.write_text(",".join(map(str, all_of)) + "\n")
        (tmp_path / "own").write_text("0::/\n" + "3:cpu,cpuacct:/\n" * ("cpu.max" not in files))
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        for name, value in {"CPUS": "cpus", "CGROUP_ROOT": "", "PROC_CGROUP": "own"}.items():
            monkeypatch.setattr(resources, name, tmp_path / value)
        monkeypatch.setattr("os.cpu_count", lambda: machine)
        monkeypatch.setattr("os.sched_getaffinity", lambda thread: set(allowed))
        for name in ("OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE", "FSDPCTL_LAUNCHER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return imitate


HOSTS = {
    "one core": ((range(1), 1, (), 1), (1, 1, 1)),
    "one core of two threads": ((range(2), 2, (), 2), (1, 1, 1)),
    "4 cores": ((range(4), 1, (), 4), (4, 2, 2)),
    "16 threads of 8 cores": ((range(16), 2, (), 16), (8, 2, 4)),
    "64 cores": ((range(64), 1, (), 64), (64, 2, 16)),
    "192 threads of 96 cores": ((range(192), 2), (96, 2, 16)),
    "a mask of one of 192": (([17], 2), (1, 1, 1)),
    "a mask of both threads of 3 cores": (([1, 2, 3, 97, 98, 99], 2), (3, 2, 1)),
    "a NUMA node of two": (([*range(48), *range(96, 144)], 2), (48, 2, 16)),
    "a quota of 2.5 cores": ((range(64), 1, {"cpu.max": "250000 100000"}), (2, 2, 1)),
    "a quota of half a core": ((range(64), 1, {"cpu.max": "50000 100000"}), (1, 1, 1)),
    "no quota": ((range(8), 1, {"cpu.max": "max 100000"}), (8, 2, 4)),
    "a damaged quota": ((range(8), 1, {"cpu.max": "?"}), (8, 2, 4)),
    "a quota of version 1": ((range(64), 1, V1), (3, 2, 1)),
    "no quota of version 1": ((range(8), 1, {**V1, "cpu/cpu.cfs_quota_us": "-1"}), (8, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTS)
def test_a_run_gets_the_ranks_and_threads_that_its_cores_allow(host, name):
    options, picks = HOSTS[name]
    host(*options)
    config = compose_config(["launch.device=cpu"]).config
    placed = assign_ranks(config, LaunchRole(config.launch))
    ranks = placed.launch.nproc_per_node or 0
    threads = int(placed.launch.rank_environment(ranks)["OMP_NUM_THREADS"])
    assert (resources.num_cores(), ranks, threads) == picks
    assert assign_ranks(config).launch.nproc_per_node == ranks  # as the estimate assumes
    assert notes_on_cores(placed) == ()


@pytest.mark.parametrize(("text", "ranks", "error"), [
    ("1", 2, None), ("2,4", 2, None), ("64", 2, "2 ranks x 64 threads on 4 cores wait"),
    ("1", 5, "5 ranks x 1 thread on 4 cores wait"), ("", 2, UsageError), ("0", 2, UsageError),
    ("two", 2, UsageError), ("1e3", 2, UsageError), ("99999", 2, UsageError),
])  # fmt: skip
def test_more_threads_than_cores_are_told_and_no_number_is_refused(host, text, ranks, error):
    host(range(4), OMP_NUM_THREADS=text)
    config = compose_config(["launch.device=cpu", f"launch.nproc_per_node={ranks}"]).config
    placed = assign_ranks(config, LaunchRole(config.launch))
    if error is UsageError:
        with pytest.raises(UsageError, match=f"OMP_NUM_THREADS={text}: expected a number"):
            notes_on_cores(placed)
    else:
        assert [x.split(" for one")[0] for x in notes_on_cores(placed)] == [error] * bool(error)


@pytest.mark.parametrize(("allowed", "environ", "rank_1"), [
    (range(8), {}, {2, 3, 6, 7}),  # of cores 0, 4; 1, 5; 2, 6; 3, 7
    ([0, 4], {}, {0, 4}), ([0, 4], {"SLURM_CPUS_ON_NODE": "8"}, {0, 4}),  # its launcher's
    ([0, 4, 2, 6], {"SLURM_CPUS_ON_NODE": "4"}, {2, 6}),  # of the job
    ([0, 4, 2, 6], {"FSDPCTL_LAUNCHER": "1"}, {2, 6}),  # of a container
])  # fmt: skip
def test_ranks_share_the_cores_unless_their_launcher_has_divided_them(
    host, monkeypatch, allowed, environ, rank_1
):
    host(allowed, 2, machine=8, LOCAL_WORLD_SIZE="2", LOCAL_RANK="1", **environ)
    assert host_cpus(None) == rank_1
    assert resources.has_cpu_affinity() == (len(allowed) == 2)


@pytest.mark.parametrize(("ranks", "limits", "after"), [
    (2, (64, 4096), 160), (8, (64, 256), 256), (1, (500, 4096), 500), (9, (64, 256), None),
])  # fmt: skip
def test_few_open_files_are_raised_or_refused_before_a_run_opens(monkeypatch, ranks, limits, after):
    limit = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: limit.append(values))
    launch = LaunchConfig(device="cpu", nproc_per_node=ranks)
    config = compose_config([]).config
    if after is None:
        with pytest.raises(UsageError, match="needs 272 open files, but the limit is 256"):
            assign_ranks(config, LaunchRole(launch))
    else:
        assign_ranks(config, LaunchRole(launch))
        assert limit[-1] == (after, limits[1])
