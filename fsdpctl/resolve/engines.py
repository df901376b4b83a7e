"""What PyTorch's own engines cannot be asked for."""

from torch import nn

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.plan.engines import DDP, OURS, check_strategy
from fsdpctl.plan.strategy import get_strategy


def check_engine(config: Config) -> None:
    """See that the engine can do what a placed configuration asks of it.

    Raises:
        UsageError: it cannot; the message names the keys.
    """
    name, precision = config.engine.name, config.precision
    check_strategy(name, get_strategy(config.strategy.name))
    if name == DDP and precision.reduce_dtype != precision.master_dtype:
        raise UsageError(
            f"engine=ddp: reduces gradients in the dtype of the masters, and "
            f"precision.reduce_dtype={precision.reduce_dtype} is not "
            f"precision.master_dtype={precision.master_dtype}"
        )


def notes_on_engine(config: Config, automatic: frozenset[str]) -> tuple[str, ...]:
    """What the engine of a placed configuration does not heed of what was said.

    `automatic` are the keys of which nothing was.
    """
    name, precision = config.engine.name, config.precision
    wire, reduce = precision.wire_dtype, precision.reduce_dtype
    if name == OURS or wire in (None, reduce) or "precision.wire_dtype" in automatic:
        return ()
    return (f"engine={name}: sends gradients in precision.reduce_dtype={reduce}, not in {wire}",)


def check_trained_whole(config: Config, module: nn.Module) -> None:
    """See that the engine trains all of `module`, where it must.

    Raises:
        UsageError: some is frozen.
    """
    if config.engine.name == OURS or all(each.requires_grad for each in module.parameters()):
        return
    raise UsageError(
        f"engine={config.engine.name}: trains all parameters; model.lora and model.trainable are "
        f"for engine={OURS}"
    )
