"""The attention kernel of a configuration: whether it can run, and which one `auto` stands for."""

from dataclasses import replace
from importlib.util import find_spec

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.plan.attention import (
    KERNELS,
    MATH,
    NOT_DETERMINISTIC,
    ON_CPU,
    PACKAGES,
    SHARES,
    THEIRS,
    TWO_BYTES,
    assumed_kernel,
)
from fsdpctl.resolve.machine import with_architecture


def assumed_of(config: Config) -> str | None:
    """Return the kernel that a placed configuration is estimated with; None on the CPU: torch's."""
    kernel = config.model.attention
    if kernel not in (None, THEIRS) or config.launch.device == "cpu":
        return None if kernel == THEIRS else kernel
    deterministic = config.train.deterministic
    return assumed_kernel(config.cluster.architecture, deterministic=deterministic)


def with_kernel(config: Config, kernel: str | None) -> Config:
    """`config` with another attention kernel."""
    return replace(config, model=replace(config.model, attention=kernel))


def with_kept_kernel(config: Config, kernel: str | None) -> Config:
    """`config`, placed here, with the kernel that its run has selected, if that can run here."""
    if config.model.attention is not None or config.launch.device == "cpu":
        return config
    kept = with_kernel(config, kernel)
    return config if _problem(with_architecture(kept), here=True) else kept


def candidates(config: Config) -> list[str]:
    """Return the kernels that may run a placed configuration here, math only if no other may."""
    can = [kernel for kernel in KERNELS if not _problem(with_kernel(config, kernel), here=True)]
    return [kernel for kernel in can if kernel != MATH] or [MATH]


def check_attention(config: Config, *, here: bool = False) -> None:
    """Check that the selected kernel can run a placed configuration; `here`: with its package.

    Raises:
        UsageError: If the kernel cannot run.
    """
    if problem := _problem(config, here=here):
        given = config.model.attention
        known = [name for name in KERNELS if not _problem(with_kernel(config, name), here=here)]
        expected = ", ".join(["auto", *known])
        raise UsageError(f"model.attention={given}: {problem}; expected {expected}")


def _problem(config: Config, *, here: bool) -> str:
    """Return the reason why the selected kernel cannot run, or an empty text."""
    kernel, architecture = config.model.attention, config.cluster.architecture
    if kernel is None:
        return ""
    if kernel == THEIRS:
        is_theirs = config.model.is_foreign
        return "" if is_theirs else "only valid with model.module=transformers"
    if config.launch.device == "cpu":
        return "" if kernel in ON_CPU else "not supported on launch.device=cpu"
    if kernel in TWO_BYTES and config.precision.param_dtype == "float32":
        return "not supported in precision.param_dtype=float32"
    if kernel in NOT_DETERMINISTIC and config.train.deterministic:
        return "not supported with train.deterministic=true"
    if kernel != MATH and architecture is not None and kernel not in SHARES[architecture]:
        return f"not supported on {architecture.capitalize()} GPUs"
    if here and kernel in PACKAGES and not _is_installed(PACKAGES[kernel]):
        return f"package {PACKAGES[kernel]} not found"
    return ""


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # of the package that it is in
        return False
