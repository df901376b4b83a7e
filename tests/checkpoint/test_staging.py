"""Host memory that a save is copied into."""

import pytest
import torch

from fsdpctl.checkpoint.staging import StagingMemory


@pytest.mark.parametrize("chunk", [128, 1000, 4096, 1 << 30])
def test_copies_are_correct_in_reused_chunks(monkeypatch, chunk):
    monkeypatch.setattr("fsdpctl.checkpoint.staging._ALLOCATION_BYTES", chunk)
    sources = [torch.randn(n, dtype=dtype) for n in (3, 100, 0, 700, 1)
               for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip
    staging = StagingMemory()
    copies = staging.copy(sources)
    assert all(torch.equal(a, b) for a, b in zip(sources, copies, strict=True))
    taken = [each.numel() for each in staging._chunks]
    largest = max(each.nbytes for each in sources)
    assert max(taken) <= max(largest + 64, chunk)
    assert sum(taken) <= 2 * sum(each.nbytes + 64 for each in sources)
    before = [each.data_ptr() for each in copies]
    assert [each.data_ptr() for each in staging.copy(sources)] == before
    more = [*sources, torch.randn(5000)]
    assert all(torch.equal(a, b) for a, b in zip(more, staging.copy(more), strict=True))
