"""The attention kernel of a configuration: the value of `auto`, and checks of support."""

import torch

from fsdpctl.config.schema import Config, WithRanks
from fsdpctl.errors import UsageError
from fsdpctl.io.packages import is_installed
from fsdpctl.plan.attention_kernels import (
    AUTO_KERNELS,
    CPU_KERNELS,
    CUDNN,
    EFFICIENT,
    HALF_PRECISION_KERNELS,
    KERNEL_PACKAGES,
    KERNELS,
    MATH,
    NONDETERMINISTIC_KERNELS,
    PEAK_FRACTIONS,
    TRANSFORMERS,
)

# GPU generations by compute capability. GeForce cards of 12.x run Ada's kernels, not Blackwell's.
_ARCHITECTURES = {
    (8, 0): "ampere", (8, 6): "ampere", (8, 7): "ampere", (8, 9): "ada", (9, 0): "hopper",
    (10, 0): "blackwell", (10, 3): "blackwell", (12, 0): "ada", (12, 1): "ada",
}  # fmt: skip
_FIRST_CUDNN = 91501  # 9.15.1: earlier results may be wrong for lengths not divisible by 128


def kernel_of(config: Config, *, is_here: bool = False) -> str | None:
    """Return the kernel of a configuration with ranks; None is torch's choice, for CPU ranks.

    `auto` selects a kernel of torch for the GPU of the cluster or, with `is_here`, of this host. If
    the kernel does not support an input, such as a mask, torch falls back to another kernel.
    """
    kernel = config.model.attention
    if config.launch.device == "cpu":
        return None if kernel == TRANSFORMERS else kernel
    if kernel not in (None, TRANSFORMERS):  # the attention of transformers runs a kernel of torch
        return kernel
    supported = [name for name in AUTO_KERNELS if not _problem(config, name, is_here=is_here)]
    cudnn = torch.backends.cudnn.version()  # None without cuDNN here: assume a new one
    if CUDNN in supported and cudnn is not None and cudnn < _FIRST_CUDNN:
        supported.remove(CUDNN)
    shares = PEAK_FRACTIONS.get(_architecture(config, is_here=is_here) or "", {})
    return max(supported, key=lambda name: shares.get(name, 0.0), default=EFFICIENT)


def can_run(config: Config, kernel: str | None) -> bool:
    """Return whether a kernel can run on this machine."""
    return not _problem(config, kernel, is_here=True)


def notes_on_kernel(config: WithRanks) -> tuple[str, ...]:
    """Return a line if `auto` doesn't select a kernel whose package is installed here."""
    if config.model.attention is not None or config.launch.device == "cpu":
        return ()
    for name in KERNEL_PACKAGES if architecture_here() else ():
        if not _problem(config, name, is_here=True):
            note = f"package {KERNEL_PACKAGES[name]} is not used"
            return (f"model.attention=auto: {note}; set model.attention={name} to use it",)
    return ()


def check_attention(config: Config, *, is_here: bool = False) -> None:
    """Check that the kernel supports a configuration with ranks and, if `is_here`, is installed."""
    kernel = config.model.attention
    if problem := _problem(config, kernel, is_here=is_here):
        supported = [name for name in KERNELS if not _problem(config, name, is_here=is_here)]
        expected = ", ".join(["auto", *supported])
        raise UsageError(f"model.attention={kernel}: {problem}; expected {expected}")


def architecture_here() -> str | None:
    """Return the generation of this machine's first GPU, or None if unknown. Requires a GPU."""
    return _ARCHITECTURES.get(torch.cuda.get_device_capability(0))


def _architecture(config: Config, *, is_here: bool) -> str | None:
    uses_local_gpu = is_here and config.launch.device == "cuda"
    return architecture_here() if uses_local_gpu else config.cluster.architecture


def _problem(config: Config, kernel: str | None, *, is_here: bool) -> str:
    """Return why a kernel cannot run a configuration; empty if it can."""
    if kernel in (None, TRANSFORMERS):
        return ""
    if config.launch.device == "cpu":
        return "" if kernel in CPU_KERNELS else "not supported on launch.device=cpu"
    architecture = _architecture(config, is_here=is_here)
    if kernel in HALF_PRECISION_KERNELS and config.precision.param_dtype == "float32":
        return "not supported in precision.param_dtype=float32"
    if kernel in NONDETERMINISTIC_KERNELS and config.train.deterministic:
        return "not supported with train.deterministic=true"
    if kernel != MATH and architecture is not None and kernel not in PEAK_FRACTIONS[architecture]:
        return f"not supported on {architecture.capitalize()} GPUs"
    if is_here and kernel in KERNEL_PACKAGES and not is_installed(KERNEL_PACKAGES[kernel]):
        return f"package {KERNEL_PACKAGES[kernel]} not found"
    return ""
