"""What is kept of a failure for want of a device's memory."""

import pytest
import torch

from fsdpctl.training.callbacks.profiling import keep_snapshot, watch_allocations


@pytest.fixture
def dumped(monkeypatch):
    found: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", found.append)
    return found


def test_the_error_names_the_snapshot_file(tmp_path, dumped):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    keep_snapshot(error, tmp_path, 3)
    assert dumped == [str(tmp_path / "memory-snapshot-rank-00003.bin")]
    assert str(error).startswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB.; memory snapshot: "
    )
    assert dumped[0] in str(error)


def test_other_errors_are_not_changed(tmp_path, dumped):
    error = RuntimeError("shapes differ")
    keep_snapshot(error, tmp_path, 0)
    assert (dumped, str(error)) == ([], "shapes differ")


def test_a_failed_snapshot_does_not_change_the_error(tmp_path, monkeypatch):
    def fail(path: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fail)
    error = torch.OutOfMemoryError("CUDA out of memory")
    keep_snapshot(error, tmp_path, 0)
    assert str(error) == "CUDA out of memory"


def test_allocations_are_recorded_on_cuda_only(monkeypatch):
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **about: asked.append(about)
    )
    watch_allocations(torch.device("cpu"))
    assert asked == []
    watch_allocations(torch.device("cuda"))
    assert asked[0]["stacks"] == "python"  # those of C++ cost many times more


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_out_of_memory_error_writes_a_snapshot(tmp_path):
    device = torch.device("cuda")
    watch_allocations(device)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    torch.cuda.memory._record_memory_history(enabled=None)
    keep_snapshot(caught.value, tmp_path, 0)
    (file,) = tmp_path.iterdir()
    assert str(file) in str(caught.value)
    assert file.stat().st_size > 0
