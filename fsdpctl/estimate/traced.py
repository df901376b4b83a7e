"""Traced models: the operators and allocations of their passes."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, takewhile
from operator import eq
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.any_decoder import family_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import ActivationCheckpointingConfig, Settled
from fsdpctl.engine.blocks import checkpoint_blocks, chunk_feed_forward
from fsdpctl.errors import UsageError
from fsdpctl.estimate.recurrences import packages_of
from fsdpctl.estimate.trace import trace
from fsdpctl.models.attention import import_kernels
from fsdpctl.models.describe import divide_module, torch_dtype
from fsdpctl.models.quantized import count_weights, pairs
from fsdpctl.models.registry import build_model, count_active
from fsdpctl.models.row_documents import assumed_documents
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.attention_kernels import THEIRS
from fsdpctl.plan.batch import ContextParallel
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.compute import Pass, Program, UnitRow, traced_of
from fsdpctl.resolve.attention_kernel import kernel_of

_PLAIN = (bool, int, float, str, type(None))
_LONGEST_PERIOD = 12  # of blocks in a row
_NUMBERS_A_LAYER = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})


@dataclass(frozen=True, slots=True)
class ShortModule:
    """A module on the meta device with few of its like blocks."""

    module: nn.Module
    rows: Sequence[UnitRow] = ()  # which blocks represent which

    @classmethod
    def of(cls, module: nn.Module, units: Sequence[UnitSpec]) -> "ShortModule":
        """Remove blocks of a module."""
        blocks = [unit.name for unit in units if unit.kind == "block"]
        rows: list[UnitRow] = []
        for parent, names in groupby(blocks, key=lambda name: name.rpartition(".")[0]):
            siblings = module.get_submodule(parent)
            members = [name.rpartition(".")[2] for name in names]
            if isinstance(siblings, nn.ModuleList) and members == list(siblings._modules):
                rows += _shorten_list(parent, siblings)
        if isinstance(module, TransformersDecoder):
            _shorten_configuration(module.transformers_model.config, rows)
        return cls(module, rows)


def _shorten_configuration(config: Any, rows: Sequence[UnitRow]) -> None:
    """Leave the entries of kept blocks, whose masks a model selects by their place in the list."""
    kept = [name.rpartition(".")[2] for row in rows for name in row.whole[: len(row.traced)]]
    for each in vars(config).values():
        if isinstance(each, list) and len(each) == sum(len(row.whole) for row in rows):
            each[:] = [each[int(index)] for index in kept]


def _shorten_list(parent: str, siblings: nn.ModuleList) -> list[UnitRow]:
    blocks = list(siblings)
    looks = [_looks(block) for block in blocks]
    kinds = [looks.index(each) for each in looks]
    rows: list[UnitRow] = []
    kept: list[nn.Module] = []
    start = 0
    while start < len(blocks):
        length, period = _row_at(kinds[start:])
        count = traced_of(length, period)
        whole = tuple(f"{parent}.{start + index}" for index in range(length))
        traced = tuple(f"{parent}.{len(kept) + index}" for index in range(count))
        rows.append(UnitRow(traced, whole, period))
        kept += blocks[start : start + count]
        start += length
    del siblings[:]
    siblings.extend(kept)
    return rows


def _row_at(kinds: Sequence[int]) -> tuple[int, int]:
    """Return the length and the period of the first row, which leaves out most."""
    found: list[tuple[int, int]] = []
    for period in range(1, min(_LONGEST_PERIOD, len(kinds)) + 1):
        alike = takewhile(bool, map(eq, kinds, kinds[period:]))
        found.append((period + len(list(alike)), period))
    return max(found, key=lambda row: row[0] - traced_of(*row))


def _looks(block: nn.Module) -> object:
    """Return what determines the allocations of a block, which shares no parameters."""
    return [
        (
            name,
            type(each),
            [
                (key, tuple(param.shape), param.dtype, param.requires_grad)
                for key, param in each._parameters.items()
                if param is not None
            ],
            [
                (key, value)
                for key, value in each.__dict__.items()
                if isinstance(value, _PLAIN) and key not in _NUMBERS_A_LAYER
            ],
        )
        for name, each in block.named_modules()
    ]


class TracedModule:
    """A module on the meta device, with few of its like blocks, that is traced."""

    def __init__(
        self,
        short: ShortModule,
        make: Callable[[], nn.Module],
        units: Sequence[UnitSpec],
        *,
        checkpointing: ActivationCheckpointingConfig,
        dtype: torch.dtype | None,
        device: str,
        kernel: str | None = None,
    ) -> None:
        """Prepare a module as for training, in place.

        `make` makes it with all `units`, if all blocks must be run. `dtype` is that of the
        computation; None: that of its parameters.
        """
        self._make, self._units = make, units
        self._names = [unit.name for unit in units[1:]]
        self._blocks = [unit.name for unit in units if unit.kind == "block"]
        self._checkpointing, self._dtype = checkpointing, dtype
        self._device, self._kernel = device, kernel
        self._prepare(short)

    def program(self, run: Callable[[nn.Module], object]) -> Program:
        """Return a pass of the whole model; `run` runs one, and returns what outlives it."""
        passed = self._trace(run)
        if not all(row.is_regular(passed) for row in self._rows):
            self._prepare(ShortModule(self._make()))
            passed = self._trace(run)
        return Program(passed, self._names, self._rows)

    def remake(self) -> None:
        """Trace another module from now on, which `make` makes."""
        self._prepare(ShortModule.of(self._make(), self._units))

    def _prepare(self, short: ShortModule) -> None:
        self._module, self._rows = short.module, short.rows
        traced = {
            name: row.traced[row.stand_in(index)]
            for row in self._rows
            for index, name in enumerate(row.whole)
        }
        self._recomputed = list(dict.fromkeys(traced.get(name, name) for name in self._blocks))
        others = (name for name in self._names if name not in self._blocks)
        self._traced = [*self._recomputed, *others]
        about = self._checkpointing
        if about.name != "none":
            blocks = [self._module.get_submodule(name) for name in self._recomputed]
            self._inputs = checkpoint_blocks(blocks, about.name, offload=about.offload)
        for param in self._module.parameters():
            if self._dtype is not None and param.is_floating_point():
                param.data = param.data.to(self._dtype)

    def _trace(self, run: Callable[[nn.Module], object]) -> Pass:
        passed = trace(
            self._module, self._traced, lambda: run(self._module), self._device, self._kernel
        )
        sizes = self._inputs.sizes if self._checkpointing.offload else {}
        return replace(passed, sent={self._recomputed[n]: size for n, size in sizes.items()})


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on the meta device with few of its like blocks, and what the whole one has."""

    short: ShortModule
    units: tuple[UnitSpec, ...]
    num_params: int
    num_active: int
    num_trained: int


def _make(config: ModelConfig, chunk_tokens: int, plain_norms: bool) -> nn.Module:
    module = build_model(config, plain_norms=plain_norms)
    chunk_feed_forward(module, chunk_tokens)
    return module


@lru_cache(maxsize=8)
def _built(config: ModelConfig, chunk_tokens: int, plain_norms: bool) -> BuiltModel:
    """Return a model, which no one else may change."""
    module = _make(config, chunk_tokens, plain_norms)
    units = divide_module(module, None)
    return BuiltModel(
        num_params=sum(count_weights(module).values()),
        num_active=count_active(module),
        num_trained=sum(each.numel() for each in module.parameters() if each.requires_grad),
        units=units,
        short=ShortModule.of(module, units),
    )


class TracedModel:
    """The model of a configuration, which is traced at any size and length."""

    def __init__(self, config: Settled) -> None:
        """Build the model of a placed configuration on the meta device.

        UsageError if the model's sizes conflict.
        """

        self._model, chunk_tokens = config.model, config.train.mlp_chunk_tokens or 0
        plain_norms = config.engine.facts.plain_norms
        built = _built(config.model, chunk_tokens, plain_norms)
        self.units, self.num_trained = built.units, built.num_trained
        self.num_params, self.num_active = built.num_params, built.num_active
        module = deepcopy(built.short.module)
        self.packages = packages_of(module) if config.launch.device == "cuda" else ()
        self._traced_module = TracedModule(
            ShortModule(module, built.short.rows),
            lambda: _make(self._model, chunk_tokens, plain_norms),
            self.units,
            checkpointing=config.activation_checkpointing,
            dtype=torch_dtype(str(config.precision.param_dtype)),
            device=str(config.launch.device),
            kernel=kernel_of(config),
        )
        self._holds_documents = config.data.holds_documents
        self._device = str(config.launch.device)
        shared = config.train.context_parallel
        self._context = None if shared == 1 else ContextParallel(shared, 0)
        self._keeps_logits = config.engine.facts.keeps_logits
        self._programs: dict[tuple[int, int, int], Program] = {}

    def program(self, micro_batch_size: int, seq_len: int, chunk_tokens: int) -> Program:
        """Return a pass over `micro_batch_size` samples; `chunk_tokens` as in the loss.

        `seq_len` is the number of each sample's tokens on a rank.
        """
        kept: list[Tensor] = []

        def run(module: nn.Module) -> Tensor:
            tokens = torch.empty(micro_batch_size, seq_len, dtype=torch.int64)
            targets = torch.empty_like(tokens)
            about = {}
            if self._holds_documents or self._context is not None:
                size = seq_len * (1 if self._context is None else self._context.size)
                about["documents"] = assumed_documents(
                    micro_batch_size,
                    size,
                    self._device,
                    context=self._context,
                    are_rows=not self._holds_documents,
                )
            if self._keeps_logits and not chunk_tokens:
                kept[:] = [module(tokens, **about).float()]
                loss = F.cross_entropy(kept[0].flatten(0, -2), targets.flatten(), reduction="sum")
            else:
                loss = module(tokens, targets, chunk_tokens or None, **about)
            (loss / tokens.numel()).backward()
            return loss

        key = (micro_batch_size, seq_len, chunk_tokens)
        if key not in self._programs:
            pairs.cache_clear()  # its table is part of what a first pass allocates
            import_kernels(self._device)
            self._programs[key] = self._program(run)
        return self._programs[key]

    def _program(self, run: Callable[[nn.Module], object]) -> Program:
        try:
            return self._traced_module.program(run)
        except Exception as error:  # of the code of a family, which our attention may not serve
            if self._model.attention == THEIRS:
                reason = str(error).strip().partition("\n")[0]
                raise UsageError(
                    f"model: {family_of(self._model)}: memory cannot be estimated: {reason}"
                ) from error
        self._model = replace(self._model, attention=THEIRS)
        self._traced_module.remake()
        return self._program(run)
