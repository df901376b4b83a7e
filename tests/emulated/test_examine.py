"""Parts of the package that only do something on CUDA devices."""

import torch

from fsdpctl.checkpoint.tensors import Staging
from tests.distributed import distributed


@distributed(world_size=1, on_devices=True)
def test_memory_for_the_first_save_is_pinned_beforehand(rank: int, world_size: int) -> None:
    tensors = [torch.randn(n, device="cuda") for n in (700, 3)]
    staging = Staging()
    staging.prepare(tensors)
    assert staging._preparing is not None
    staging._preparing.join()
    pinned = [each.data_ptr() for each in staging._chunks]
    copies = staging.copies(tensors)
    assert copies[0].is_pinned()
    assert copies[0].data_ptr() == pinned[0]
    assert [each.data_ptr() for each in staging._chunks] == pinned
    assert all(torch.equal(one, other.cpu()) for one, other in zip(copies, tensors, strict=True))
