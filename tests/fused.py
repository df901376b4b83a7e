"""Kernels of CPU tensors, fused by a backend of Dynamo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from fsdpctl.models.custom_ops import compiled, fuse_kernels


@contextmanager
def fused_by(backend: str) -> Iterator[Callable[[], int]]:
    """Fuse kernels in the block; yield a function that returns the number of graphs made."""
    compile_with = torch.compile

    def by_backend(function: Any, *, dynamic: bool, options: dict[str, Any]) -> Any:
        compile_options: dict[str, Any] = {"options": options} if backend == "inductor" else {}
        return compile_with(
            function, dynamic=dynamic, backend=backend, fullgraph=True, **compile_options
        )

    torch._dynamo.reset()
    counters.clear()
    compiled.cache_clear()
    with mock.patch.object(torch, "compile", by_backend), fuse_kernels("cpu"):
        yield lambda: counters["stats"]["unique_graphs"]
    compiled.cache_clear()
