"""Computation of a script's module in bf16.

Note: the rule is that of Lightning and accelerate with FSDP. Parameters are gathered in bf16, and
floating-point inputs of the module are cast to it. The script's loss function runs under
torch.autocast. Buffers keep their dtype and their values: statistics and tables of positions stay
float32, in checkpoints too. Where a module has floating-point buffers of its own, or is a
normalization, its own parameters are cast to the dtype of these, or to float32. Under autocast
alone, where parameters are float32, they have it too, and kernels expect that.
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
    """Let normalizations, and modules with buffers, compute with parameters like their buffers."""
    for each in module.modules():
        buffers = (buffer for buffer in each._buffers.values() if buffer is not None)
        dtypes = [buffer.dtype for buffer in buffers if buffer.is_floating_point()]
        if each._parameters and (dtypes or isinstance(each, _NORMS)):
            dtype = dtypes[0] if dtypes else torch.float32
            each.forward = partial(_forward_widened, each, each.forward, dtype)


def _forward_widened(
    module: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    own = module._parameters
    wide: dict[str, Any] = {
        name: param.to(dtype) if param is not None and param.is_floating_point() else param
        for name, param in own.items()
    }
    module._parameters = wide
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters = own


@contextmanager
def dtype_errors_as_usage(config: Config) -> Iterator[None]:
    """Raise a UsageError if torch refuses to compute with the dtypes of a script's module."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not (config.model.is_script_module and _DTYPE_ERROR.search(str(error))):
            raise
        dtype, frames = config.precision.param_dtype, traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if not each.filename.startswith(_LIBRARIES)]
        where = f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
        what, way = str(error).strip().splitlines()[0], "set precision=fp32, or cast there"
        if dtype == "float32":
            way = "call module.float() before fsdpctl.train, or cast there"
        problem = f"{where}{one_line(what)}; {way}"
        raise UsageError(f"precision.param_dtype={dtype}: {problem}") from error
