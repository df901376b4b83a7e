"""Traced models: the operators and allocations of their passes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fsdpctl.config.schema import Config
from fsdpctl.engine.build import divide_module
from fsdpctl.estimate.shorten import shorten
from fsdpctl.estimate.trace import trace
from fsdpctl.models.attention import import_kernels
from fsdpctl.models.documents import assumed_documents
from fsdpctl.models.registry import build_model, count_active
from fsdpctl.models.rope import rotation
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.compute import Pass, Program, UnitRow
from fsdpctl.resolve.attention import assumed_of
from fsdpctl.resolve.blocks import checkpoint_block

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TracedModule:
    """A module on the meta device, with few of its like blocks, that is traced."""

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[], nn.Module],
        units: Sequence[UnitSpec],
        *,
        checkpointing: str,
        dtype: torch.dtype | None,
        device: str,
        kernel: str | None = None,
    ) -> None:
        """Remove blocks, and prepare the others as for training.

        Args:
            module: on the meta device; it is modified.
            make: makes another one, if all blocks must be run.
            units: of the module.
            checkpointing: of its blocks: none, selective or full.
            dtype: of the computation; None: that of its parameters.
            device: whose operators are assumed, `cpu` or `cuda`.
            kernel: the assumed attention kernel; None: torch's default.
        """
        self._make = make
        self._names = [unit.name for unit in units[1:]]
        self._blocks = [unit.name for unit in units if unit.kind == "block"]
        self._checkpointing = checkpointing
        self._dtype = dtype
        self._device, self._kernel = device, kernel
        self._prepare(module, shortens=True)

    def program(self, run: Callable[[nn.Module], object]) -> Program:
        """Return a pass of the whole model; `run` runs one, and returns what outlives it."""
        passed = self._trace(run)
        if not all(row.is_regular(passed) for row in self._rows):
            self._prepare(self._make(), shortens=False)
            passed = self._trace(run)
        return Program(passed, self._names, self._rows)

    def _prepare(self, module: nn.Module, *, shortens: bool) -> None:
        self._module = module
        self._rows: list[UnitRow] = shorten(self._module, self._blocks) if shortens else []
        represented = {name for row in self._rows for name in row.whole}
        blocks = [name for row in self._rows for name in row.traced]
        blocks += [name for name in self._blocks if name not in represented]
        self._traced = [*blocks, *(name for name in self._names if name not in self._blocks)]
        if self._checkpointing != "none":
            for name in blocks:
                checkpoint_block(self._module.get_submodule(name), self._checkpointing)
        for param in self._module.parameters():
            param.data = param.data.to(self._dtype or param.dtype)

    def _trace(self, run: Callable[[nn.Module], object]) -> Pass:
        return trace(
            self._module, self._traced, lambda: run(self._module), self._device, self._kernel
        )


class TracedModel:
    """The model of a configuration, which is traced at any size and length."""

    def __init__(self, config: Config) -> None:
        """Build the model of a placed configuration on the meta device.

        Raises:
            UsageError: If the model's sizes conflict.
        """
        module = build_model(config.model)
        self.num_params = sum(param.numel() for param in module.parameters())
        self.num_active = count_active(module)
        self.num_trained = sum(
            param.numel() for param in module.parameters() if param.requires_grad
        )
        self.units = divide_module(module, None)
        self._traced_module = TracedModule(
            module,
            lambda: build_model(config.model),
            self.units,
            checkpointing=config.activation_checkpointing.name,
            dtype=_DTYPES[str(config.precision.param_dtype)],
            device=str(config.launch.device),
            kernel=assumed_of(config),
        )
        self._holds_documents = config.data.holds_documents
        # Layers with a window run on packed sequences too.
        self._needs_kernels = self._holds_documents or config.model.sliding_window is not None
        self._device = str(config.launch.device)
        self._programs: dict[tuple[int, int, int], Program] = {}

    def program(self, micro_batch_size: int, seq_len: int, chunk_tokens: int) -> Program:
        """Return a pass over `micro_batch_size` samples; `chunk_tokens` as in the loss."""

        def run(module: nn.Module) -> Tensor:
            tokens = torch.empty(micro_batch_size, seq_len, dtype=torch.int64)
            targets = torch.empty_like(tokens)
            about = {}
            if self._holds_documents:
                about["documents"] = assumed_documents(micro_batch_size, seq_len, self._device)
            loss: Tensor = module(tokens, targets, chunk_tokens or None, **about)
            (loss / tokens.numel()).backward()
            return loss

        key = (micro_batch_size, seq_len, chunk_tokens)
        if key not in self._programs:
            rotation.cache_clear()  # its tables are part of what a first pass allocates
            if self._needs_kernels:
                import_kernels(self._device)
            self._programs[key] = self._traced_module.program(run)
        return self._programs[key]
