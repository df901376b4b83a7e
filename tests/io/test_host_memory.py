"""The memory that a control group allows, from imitated files of both versions."""

import psutil
import pytest

from fsdpctl.io.resources import host_memory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _large_machine(monkeypatch):
    memory = psutil.virtual_memory()._replace(total=64 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)


@pytest.mark.parametrize(("line", "files", "gib"), [
    ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": 4 * GIB}, 4),
    ("0::/a/b", {"a/b/memory.max": 2 * GIB, "a/memory.max": 4 * GIB}, 2),
    ("0::/", {"memory.max": 3 * GIB}, 3),
    ("0::/not/seen/in/a/container", {"memory.max": 3 * GIB}, 3),
    ("0::/a", {"a/memory.max": 100 * GIB}, 64), ("0::/a", {"a/memory.max": "max"}, 64),
    ("4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": 5 * GIB}, 5),
    ("4:memory:/a", {"memory/memory.limit_in_bytes": 9223372036854771712}, 64),
    ("4:cpu:/a", {"memory/a/memory.limit_in_bytes": 5 * GIB}, 64), (None, {}, 64),
])  # fmt: skip
def test_the_least_limit_counts(line, files, gib, tmp_path):
    root, own_cgroup = tmp_path / "cgroup", tmp_path / "own"
    if line is not None:
        own_cgroup.write_text(f"{line}\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    assert host_memory(root, own_cgroup) == gib * GIB
