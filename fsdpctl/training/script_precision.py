"""Computation of a script's module in bf16.

Note: the rule is that of Lightning and accelerate with FSDP. Parameters are gathered in bf16, and
floating-point inputs of the module are cast to bf16. The script's loss function runs under
torch.autocast. Buffers keep their dtype and their values: statistics and position tables stay
float32, in checkpoints too. If a submodule has floating-point buffers, its parameters are cast to
the dtype of the buffers; parameters of a normalization without buffers are cast to float32. Under
autocast alone, parameters stay float32, and kernels expect these dtypes.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.io.texts import one_line

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_DTYPE_ERROR = re.compile(r"dtype|scalar type|BFloat16|primitive descriptor")  # in torch's messages
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def widen_parameters(module: nn.Module) -> None:
    """Have normalizations, and modules with buffers, cast their parameters as described above."""
    for submodule in module.modules():
        buffers = (buffer for buffer in submodule._buffers.values() if buffer is not None)
        dtypes = [buffer.dtype for buffer in buffers if buffer.is_floating_point()]
        if submodule._parameters and (dtypes or isinstance(submodule, _NORMS)):
            dtype = dtypes[0] if dtypes else torch.float32
            submodule.forward = partial(_forward_widened, submodule, submodule.forward, dtype)


def _forward_widened(
    module: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    """Run `forward` with cast parameters; gradients reach the originals through `to`.

    Threads must not share the module, whose parameters are replaced meanwhile.
    """
    params = module._parameters
    wide: dict[str, Any] = {
        name: param.to(dtype) if param is not None and param.is_floating_point() else param
        for name, param in params.items()
    }
    module._parameters = wide
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters = params


@contextmanager
def dtype_errors_as_usage(config: Config) -> Iterator[None]:
    """Convert torch's errors about dtypes in a script's module to UsageError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not (config.model.is_script_module and _DTYPE_ERROR.search(str(error))):
            raise
        dtype, frames = config.precision.param_dtype, traceback.extract_tb(error.__traceback__)
        of_script = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
        location = f"{of_script[-1].filename}, line {of_script[-1].lineno}: " if of_script else ""
        problem, hint = str(error).strip().splitlines()[0], "set precision=fp32, or cast there"
        if dtype == "float32":
            hint = "call module.float() before fsdpctl.train, or cast there"
        message = f"{location}{one_line(problem)}; {hint}"
        raise UsageError(f"precision.param_dtype={dtype}: {message}") from error
