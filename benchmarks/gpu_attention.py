"""Time and memory of each attention kernel of torch on a GPU.

    python -m benchmarks.gpu_attention --out benchmarks/results/gpu-attention.json

Causal attention in bf16, forward and backward, by `scaled_dot_product_attention` with one kernel
allowed at a time. If a kernel doesn't support a shape, its row has the reason.
"""

import statistics
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.one_gpu import DEVICE, device_seconds
from benchmarks.report import arguments, write_report

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
WARM_UP = 3
_MATMULS = 2 + 5  # forward and backward, recomputed scores included


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of queries, keys and values of one micro-batch."""

    samples: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    @property
    def flops(self) -> int:
        """Return the FLOPs of forward and backward; half of the scores are masked."""
        return self.samples * self.heads * self.length**2 * self.head_dim * _MATMULS

    def tensors(self) -> list[Tensor]:
        """Draw queries, keys and values."""
        return [
            torch.randn(
                (self.samples, heads, self.length, self.head_dim),
                dtype=torch.bfloat16,
                device=DEVICE,
                requires_grad=True,
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]


SHAPES = [Shape(4, 16, 16, 1024, 64), Shape(1, 32, 8, 8192, 128), Shape(1, 32, 8, 65536, 128)]
SMALL = [Shape(2, 4, 2, 16, 8)]


def measure(shape: Shape, kernel: str, rounds: int) -> dict[str, Any]:
    """Measure one kernel, or return why it doesn't support the shape or lacks memory."""
    row = {"kernel": kernel, **asdict(shape)}
    tensors = shape.tensors()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        with sdpa_kernel(KERNELS[kernel]), warnings.catch_warnings(record=True):
            seconds = [device_seconds(lambda: _pass(*tensors)) for _ in range(WARM_UP + rounds)]
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return {**row, "failed": str(error).splitlines()[0]}
    median = statistics.median(seconds[WARM_UP:])
    return {
        **row,
        "seconds": median,
        "flops_per_second": shape.flops / median,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }


def _pass(query: Tensor, key: Tensor, value: Tensor) -> None:
    grouped = query.shape[1] != key.shape[1]
    result = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    torch.autograd.grad(result, (query, key, value), result.detach())


def main() -> None:
    """Measure all kernels on all shapes."""
    options = arguments(rounds=10, small=False)  # small: a shape that takes no time
    torch.cuda.set_device(DEVICE)
    chip, results = torch.cuda.get_device_name(), []
    for shape in SMALL if options.small else SHAPES:
        for kernel in KERNELS:
            results.append(measure(shape, kernel, options.rounds))
            torch.cuda.empty_cache()
            print(results[-1], flush=True)
            write_report(options.out, "gpu_attention", results, device=chip, rounds=options.rounds)


if __name__ == "__main__":
    main()
