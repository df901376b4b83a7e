"""`fsdpctl.train` trains a script's module, loss and data with the trainer of `fsdpctl train`."""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.commands.app import exit_on_error
from fsdpctl.commands.printing import REPORTER
from fsdpctl.errors import STOP_SIGNALS
from fsdpctl.io.activity import DISPLAY, is_first_process

if TYPE_CHECKING:
    from torch import nn

    from fsdpctl.data.script_data import Loss


def train(
    *,
    module: "nn.Module",
    loss: "Loss",
    data: Any,
    val_data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    recipe: str | Path | None = None,
    settings: Sequence[str] = (),
) -> None:
    """Train `module` as one rank of torchrun or srun, or as the only rank.

    Call it once per process. It returns when the run is complete. Otherwise, it prints the reason
    in one line and exits with the code of `fsdpctl train`.

    Args:
        module: A module that is not on the meta device; training starts from rank 0's parameters.
        loss: `loss(module, batch)` returns the sum of the losses of a batch, and the count by which
            the sum is divided, such as the number of samples, pixels or tokens. A third value, a
            dict of other sums by name, is optional: they are divided by the count and reported.
        data: A map-style Dataset.
        val_data: A map-style Dataset for validation.
        collate_fn: Converts a list of samples to a batch; default: torch's `default_collate`.
        recipe: The name or path of a recipe.
        settings: Settings, KEY=VALUE, as on the command line.
    """
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        with exit_on_error():  # replaces the handlers
            if is_first_process():
                DISPLAY.start(sys.stderr, "fsdpctl.train")
            from fsdpctl.launch.run import train_task
            from fsdpctl.resolve.script_module import compose_task, make_task

            task = make_task(module, loss, data, val_data, collate_fn)
            recipe = None if recipe is None else str(recipe)
            composed, overrides = compose_task(task, settings, recipe)
            train_task(task, composed, overrides, REPORTER)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
