"""Limits of PyTorch's own engines."""

from torch import nn

from fsdpctl.config.keys import AUTO
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.plan.engines import DDP, OURS, check_strategy
from fsdpctl.plan.strategy import get_strategy


def check_engine(config: Config) -> None:
    """Check that the engine supports a placed configuration, whose strategy may be `auto`.

    Raises:
        UsageError: If it does not; the message names the keys.
    """
    name, precision = config.engine.name, config.precision
    if config.strategy.name != AUTO:
        check_strategy(name, get_strategy(config.strategy.name))
    if name == DDP and precision.reduce_dtype != precision.master_dtype:
        raise UsageError(
            f"engine=ddp: reduces gradients in the dtype of the master weights; expected "
            f"precision.reduce_dtype={precision.master_dtype}, got {precision.reduce_dtype}"
        )


def notes_on_engine(config: Config, automatic: frozenset[str]) -> tuple[str, ...]:
    """Return the settings that the engine of a placed configuration ignores, a line each.

    Args:
        config: A placed configuration.
        automatic: The keys that are not set.
    """
    name, precision = config.engine.name, config.precision
    wire, reduce = precision.wire_dtype, precision.reduce_dtype
    if name == OURS or wire in (None, reduce) or "precision.wire_dtype" in automatic:
        return ()
    return (f"engine={name}: sends gradients in precision.reduce_dtype={reduce}, not in {wire}",)


def check_trained_whole(config: Config, module: nn.Module) -> None:
    """Check that no parameter of `module` is frozen if the engine does not support it.

    Raises:
        UsageError: If one is.
    """
    if config.engine.name == OURS or all(each.requires_grad for each in module.parameters()):
        return
    raise UsageError(
        f"engine={config.engine.name}: trains all parameters; model.lora and model.trainable "
        f"require engine={OURS}"
    )
