"""The collectives of CUDA over gloo, for tests that do not depend on streams."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from fsdpctl.comm import mesh, nccl


class Stream:
    """A stand-in for torch.cuda.Stream and its events: all work runs in order."""

    def __init__(self, *options: Any, **more: Any) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self, event: object = None) -> None:
        pass


class NcclOnCpu(nccl.NcclCollectives):
    """The collectives of CUDA on tensors of the CPU."""

    _device_type = "cpu"

    def _one_launch(self, group: object) -> AbstractContextManager[None]:
        return nullcontext()  # gloo has no launches to group


@contextmanager
def nccl_path() -> Iterator[None]:
    """Shard models over the collectives of CUDA in a `with` block."""
    stream, device = Stream(), torch.device("cpu")
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "current_stream", lambda *device: stream),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (mesh, "GlooCollectives", lambda groups, _: NcclOnCpu(device, groups)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
