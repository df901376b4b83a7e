"""Plants a fault in a rank; `sitecustomize` imports this module in every rank.

FSDPCTL_FAULT describes the fault as JSON. The file `mark` ensures that it strikes only once.
"""

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from fsdpctl.data.batches import Batches
from fsdpctl.training import decoder_loss

_training, _summed = Batches.training, decoder_loss.summed_loss


def plant(fault: dict[str, Any]) -> None:
    """Plant the fault of `kind` if this is its rank; it strikes at the given call."""
    if int(os.environ.get("RANK") or os.environ["SLURM_PROCID"]) != fault["rank"]:
        return
    calls = iter(range(1 << 60))

    def is_due() -> bool:
        if next(calls) < fault["call"]:
            return False
        try:
            Path(fault["mark"]).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def training(batches: Batches, samples: int, rank: int, micro_step: int) -> Any:
        if is_due():
            if fault["kind"] == "data error":
                raise OSError(5, "Input/output error", "planted")
            if fault["kind"] == "interpreter held":
                lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
                for _ in range(2):  # the second one blocks while holding the GIL
                    libc.pthread_mutex_lock(lock)
            time.sleep(1e6)  # the others wait for a collective that never comes
        return _training(batches, samples, rank, micro_step)

    def summed(*args: Any, **named: Any) -> torch.Tensor:
        result: torch.Tensor = _summed(*args, **named)
        if not (torch.is_grad_enabled() and is_due()):
            return result
        if fault["kind"] == "NaN in the loss":
            return result * float("nan")
        result.register_hook(lambda grad: grad * float("nan"))
        return result

    if fault["kind"].startswith("NaN"):
        decoder_loss.summed_loss = summed
    else:
        Batches.training = training  # type: ignore[method-assign, assignment]


plant(json.loads(os.environ["FSDPCTL_FAULT"]))
