"""The memory snapshot that an out-of-memory error leaves."""

from pathlib import Path

import pytest
import torch

from fsdpctl.training.callbacks.memory import watch_allocations, write_snapshot

LACKS = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(("error", "has_room", "is_named"), [
    (torch.OutOfMemoryError(LACKS), True, True), (torch.OutOfMemoryError(LACKS), False, False),
    (RuntimeError(LACKS), True, False),
])  # fmt: skip
def test_out_of_memory_errors_name_a_snapshot(tmp_path, monkeypatch, error, has_room, is_named):
    def dump(path: str) -> None:
        if not has_room:
            raise OSError("no space left")
        Path(path).touch()

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    write_snapshot(error, tmp_path, 3)
    file = tmp_path / "memory-snapshot-rank-00003.bin"
    assert file.exists() == is_named
    message = f"{LACKS}; memory snapshot: {file} (open it at " if is_named else LACKS
    assert str(error).startswith(message)
    assert ("snapshot" in str(error)) == is_named


def test_allocations_are_recorded_on_cuda_only(monkeypatch):
    calls: list[dict[str, object]] = []
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda **x: calls.append(x))
    watch_allocations(torch.device("cpu"))
    assert calls == []
    watch_allocations(torch.device("cuda"))
    assert calls[0]["stacks"] == "python"  # stacks of C++ cost many times more


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_out_of_memory_error_writes_a_snapshot(tmp_path):
    device = torch.device("cuda")
    watch_allocations(device)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    torch.cuda.memory._record_memory_history(enabled=None)
    write_snapshot(caught.value, tmp_path, 0)
    (file,) = tmp_path.iterdir()
    assert str(file) in str(caught.value)
    assert file.stat().st_size > 0
