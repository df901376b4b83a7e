"""What the computation of a configured model allocates."""

import torch
from torch import Tensor, nn

from fsdpctl.config.schema import Config
from fsdpctl.engine.build import divide_module
from fsdpctl.memory.compute import Program, Row
from fsdpctl.memory.shorten import shorten
from fsdpctl.memory.trace import trace
from fsdpctl.models.registry import build_model
from fsdpctl.models.rope import rotation
from fsdpctl.plan.units import UnitSpec
from fsdpctl.train.blocks import checkpoint_block

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TracedModel:
    """A model without memory, of which a pass can be observed at any batch size and length."""

    def __init__(self, config: Config) -> None:
        """Of a configuration that is placed.

        Raises:
            UsageError: the model's numbers contradict each other.
        """
        self._config = config
        module = build_model(config.model)
        self.num_params = sum(param.numel() for param in module.parameters())
        self.units = divide_module(module, None)
        self._module, self._rows = _to_trace(config, module, self.units, shortens=True)
        self._programs: dict[tuple[int, int, int], Program] = {}

    def program(self, micro_batch_size: int, seq_len: int, chunk_tokens: int) -> Program:
        """A pass over `micro_batch_size` samples; `chunk_tokens` as in the loss."""
        key = (micro_batch_size, seq_len, chunk_tokens)
        if key not in self._programs:
            self._programs[key] = self._trace(*key)
        return self._programs[key]

    def _trace(self, micro_batch_size: int, seq_len: int, chunk_tokens: int) -> Program:
        config = self._config

        def run() -> Tensor:
            tokens = torch.empty(micro_batch_size, seq_len, dtype=torch.int64)
            targets = torch.empty_like(tokens)
            loss: Tensor = self._module(tokens, targets, chunk_tokens or None)
            (loss / tokens.numel()).backward()
            return loss

        device = str(config.launch.device)
        names = [unit.name for unit in self.units[1:]]
        stood_for = {name: row for row in self._rows for name in row.whole}
        traced = [name for name in names if name not in stood_for]
        traced = [*(each for row in self._rows for each in row.traced), *traced]
        rotation.cache_clear()  # its tables are part of what a first pass allocates
        passed = trace(self._module, traced, run, device)
        if not all(row.is_regular(passed) for row in self._rows):
            whole = build_model(config.model)
            self._module, self._rows = _to_trace(config, whole, self.units, shortens=False)
            return self._trace(micro_batch_size, seq_len, chunk_tokens)
        return Program(passed, names, self._rows)


def _to_trace(
    config: Config, module: nn.Module, units: tuple[UnitSpec, ...], *, shortens: bool
) -> tuple[nn.Module, list[Row]]:
    blocks = [unit.name for unit in units if unit.kind == "block"]
    rows = shorten(module, blocks) if shortens else []
    traced = [name for row in rows for name in row.traced] or blocks
    if config.activation_checkpointing.name != "none":
        for name in traced:
            checkpoint_block(module.get_submodule(name), config.activation_checkpointing.name)
    dtype = _DTYPES[str(config.precision.param_dtype)]
    for param in module.parameters():
        param.data = param.data.to(dtype)
    return module, rows
