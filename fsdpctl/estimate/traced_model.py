"""Traced models: the operators and allocations of their passes."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, takewhile
from operator import eq
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.decoder_config import model_type_of
from fsdpctl.config.launch import EmulatedProgram
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import ActivationCheckpointingConfig, Filled
from fsdpctl.engine.blocks import checkpoint_blocks, chunk_feed_forward
from fsdpctl.errors import UsageError
from fsdpctl.estimate.library_kernels import fuse_experts, packages_of
from fsdpctl.estimate.trace import trace
from fsdpctl.models.attention import import_kernels
from fsdpctl.models.build_model import build_model, count_active_parameters
from fsdpctl.models.module_spec import module_units, torch_dtype
from fsdpctl.models.packed_documents import assumed_documents
from fsdpctl.models.quantized import code_pairs, count_weights
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.attention_kernels import TRANSFORMERS
from fsdpctl.plan.batch_plan import ContextParallel
from fsdpctl.plan.recomputation import BlockCheckpointing
from fsdpctl.plan.units import UnitSpec
from fsdpctl.predict.model_pass import ModelPass, RepeatedUnits, TracedPass, num_traced
from fsdpctl.resolve.attention_kernel import kernel_of

_PLAIN = (bool, int, float, str, type(None))
_LONGEST_PERIOD = 12  # of blocks in a row
_NUMBERS_A_LAYER = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})


class MetaModule:
    """A module on the meta device, and the kinds of its blocks."""

    def __init__(self, module: nn.Module, units: Sequence[UnitSpec]) -> None:
        self.module, self.units = module, units
        self.blocks = [unit.name for unit in units if unit.kind == "block"]
        self._kinds: dict[str, list[int]] = {}  # of the blocks of a list
        for parent, names in groupby(self.blocks, key=_parent):
            siblings = module.get_submodule(parent)
            members = [name.rpartition(".")[2] for name in names]
            if isinstance(siblings, nn.ModuleList) and members == list(siblings._modules):
                looks = [_signature(block) for block in siblings]
                self._kinds[parent] = [looks.index(each) for each in looks]

    def kind(self, block: str) -> int:
        """Return the number of a block's kind among those of its list."""
        parent, _, index = block.rpartition(".")
        return self._kinds[parent][int(index)]

    def repeated_units(self, treatments: Mapping[str, BlockCheckpointing]) -> list[RepeatedUnits]:
        """Return rows of blocks that are alike and have one treatment."""
        rows: list[RepeatedUnits] = []
        for parent, alike in self._kinds.items():
            whole = [f"{parent}.{index}" for index in range(len(alike))]
            kinds = [*zip(alike, map(treatments.get, whole), strict=True)]
            start = traced = 0
            while start < len(whole):
                length, period = _first_repetition(kinds[start:])
                count = num_traced(length, period)
                names = tuple(f"{parent}.{traced + index}" for index in range(count))
                rows.append(RepeatedUnits(names, tuple(whole[start : start + length]), period))
                start, traced = start + length, traced + count
        return rows

    def shortened(self, rows: Sequence[RepeatedUnits]) -> nn.Module:
        """Return a copy with the traced blocks of `rows` in place of all."""
        memo: dict[int, Any] = {}
        for parent, of_list in groupby(rows, key=lambda row: _parent(row.units[0])):
            siblings = self.module.get_submodule(parent)
            kept = [name for row in of_list for name in row.units[: len(row.traced)]]
            blocks = [deepcopy(self.module.get_submodule(name), memo) for name in kept]
            memo[id(siblings)] = few = copy(siblings)
            few._modules = {str(index): block for index, block in enumerate(blocks)}
        module = deepcopy(self.module, memo)
        if isinstance(module, TransformersDecoder):
            _shorten_configuration(module.transformers_model.config, rows)
        return module


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _shorten_configuration(config: Any, rows: Sequence[RepeatedUnits]) -> None:
    """Leave the entries of kept blocks, whose masks a model selects by their place in the list."""
    kept = [name.rpartition(".")[2] for row in rows for name in row.units[: len(row.traced)]]
    for each in vars(config).values():
        if isinstance(each, list) and len(each) == sum(len(row.units) for row in rows):
            each[:] = [each[int(index)] for index in kept]


def _first_repetition(kinds: Sequence[object]) -> tuple[int, int]:
    """Return the length and the period of the first row, which leaves out most."""
    found: list[tuple[int, int]] = []
    for period in range(1, min(_LONGEST_PERIOD, len(kinds)) + 1):
        alike = takewhile(bool, map(eq, kinds, kinds[period:]))
        found.append((period + len(list(alike)), period))
    return max(found, key=lambda row: row[0] - num_traced(*row))


def _signature(block: nn.Module) -> object:
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


class PassTracer:
    """A module whose passes are traced, with few of its like blocks."""

    def __init__(
        self,
        whole: MetaModule,
        *,
        dtype: torch.dtype | None,
        device: str,
        kernel: str | None = None,
    ) -> None:
        """`dtype` is that of the computation; None: that of its parameters."""
        self._module, self._dtype = whole, dtype
        self._device, self._kernel = device, kernel
        self._passes: dict[object, TracedPass] = {}

    def model_pass(
        self,
        run: Callable[[nn.Module], object],
        checkpointing: ActivationCheckpointingConfig,
        about: object = None,
    ) -> ModelPass:
        """Return a pass of the whole model, with its blocks prepared as for training.

        `run` runs one, and returns what outlives it. It does the same if `about` is equal.
        """
        blocks = self._module.blocks
        treatments = dict(zip(blocks, checkpointing.treatments(len(blocks)), strict=True))
        rows = self._module.repeated_units(treatments)
        passed = self._pass(run, rows, treatments, about)
        if not all(row.is_regular(passed) for row in rows):
            rows = []
            passed = self._pass(run, rows, treatments, about)
        return ModelPass(passed, [unit.name for unit in self._module.units[1:]], rows)

    def _pass(
        self,
        run: Callable[[nn.Module], object],
        rows: Sequence[RepeatedUnits],
        treatments: Mapping[str, BlockCheckpointing],
        about: object,
    ) -> TracedPass:
        """Trace a pass, unless one of the same blocks with the same treatments has been."""
        names = {
            name: row.traced[row.stand_in(index)]
            for row in rows
            for index, name in enumerate(row.units)
        }
        treated = {names.get(name, name): each for name, each in treatments.items()}
        kept = [name for row in rows for name in row.units[: len(row.traced)]]
        key = (tuple(treated.items()), tuple(map(self._module.kind, kept)), about)
        if key not in self._passes:
            self._passes[key] = self._trace(run, rows, treated)
        return self._passes[key]

    def _trace(
        self,
        run: Callable[[nn.Module], object],
        rows: Sequence[RepeatedUnits],
        treated: Mapping[str, BlockCheckpointing],
    ) -> TracedPass:
        module = self._module.shortened(rows)
        blocks = [module.get_submodule(name) for name in treated]
        inputs = checkpoint_blocks(blocks, [*treated.values()])
        for param in module.parameters():
            if self._dtype is not None and param.is_floating_point():
                param.data = param.data.to(self._dtype)
        others = (unit.name for unit in self._module.units[1:] if unit.kind != "block")
        traced = [*treated, *others]
        passed = trace(module, traced, lambda: run(module), self._device, self._kernel)
        sent = {name: inputs.sizes.get(n, 0) for n, name in enumerate(treated)}
        return replace(passed, offloaded={name: size for name, size in sent.items() if size})


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on the meta device, and what it has."""

    whole: MetaModule
    num_params: int
    num_active: int
    num_trained: int


def _build(config: ModelConfig, chunk_tokens: int, facts: EmulatedProgram) -> nn.Module:
    module = build_model(config, transformers_norms=facts.transformers_norms)
    chunk_feed_forward(module, chunk_tokens)
    if facts.fused_experts:
        fuse_experts(module)
    return module


@lru_cache(maxsize=8)
def _built(config: ModelConfig, chunk_tokens: int, facts: EmulatedProgram) -> BuiltModel:
    """Return a model, which no one else may change."""
    module = _build(config, chunk_tokens, facts)
    return BuiltModel(
        num_params=sum(count_weights(module).values()),
        num_active=count_active_parameters(module),
        num_trained=sum(each.numel() for each in module.parameters() if each.requires_grad),
        whole=MetaModule(module, module_units(module, None)),
    )


class TracedModel:
    """The model of a configuration, which is traced at any size and length."""

    def __init__(self, config: Filled) -> None:
        """Build the model of a placed configuration on the meta device.

        UsageError if the model's sizes conflict.
        """

        self._model = config.model
        self._build_options = config.train.mlp_chunk_tokens or 0, config.engine.emulated
        built = _built(config.model, *self._build_options)
        self.units, self.num_trained = tuple(built.whole.units), built.num_trained
        self.num_params, self.num_active = built.num_params, built.num_active
        self.num_blocks = len(built.whole.blocks)
        is_cuda = config.launch.device == "cuda"
        self.packages = packages_of(built.whole.module) if is_cuda else ()
        self._dtype = torch_dtype(str(config.precision.param_dtype))
        self._kernel = kernel_of(config)
        self._holds_documents = config.data.holds_documents
        self._device = str(config.launch.device)
        shared = config.train.context_parallel
        self._context = None if shared == 1 else ContextParallel(shared, 0)
        self._keeps_logits = config.engine.emulated.keeps_logits
        self._model_passes: dict[object, ModelPass] = {}
        self._tracer = self._tracer_of(built.whole)

    def _tracer_of(self, whole: MetaModule) -> PassTracer:
        return PassTracer(whole, dtype=self._dtype, device=self._device, kernel=self._kernel)

    def model_pass(
        self,
        micro_batch_size: int,
        seq_len: int,
        chunk_tokens: int,
        checkpointing: ActivationCheckpointingConfig,
    ) -> ModelPass:
        """Return a pass over `micro_batch_size` samples; `chunk_tokens` as in the loss.

        `seq_len` is the number of each sample's tokens on a rank. UsageError if the model has fewer
        blocks than `checkpointing` names.
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
                    one_per_row=not self._holds_documents,
                )
            if self._keeps_logits and not chunk_tokens:
                kept[:] = [module(tokens, **about).float()]
                loss = F.cross_entropy(kept[0].flatten(0, -2), targets.flatten(), reduction="sum")
            else:
                loss = module(tokens, targets, chunk_tokens or None, **about)
            (loss / tokens.numel()).backward()
            return loss

        sizes = (micro_batch_size, seq_len, chunk_tokens)
        if (key := (sizes, checkpointing)) not in self._model_passes:
            code_pairs.cache_clear()  # its table is part of what a first pass allocates
            import_kernels(self._device)
            checkpointing.treatments(self.num_blocks)
            self._model_passes[key] = self._traced_pass(run, checkpointing, sizes)
        return self._model_passes[key]

    def _traced_pass(
        self,
        run: Callable[[nn.Module], object],
        checkpointing: ActivationCheckpointingConfig,
        sizes: object,
    ) -> ModelPass:
        try:
            return self._tracer.model_pass(run, checkpointing, sizes)
        except Exception as error:  # of the code of a family, which our attention may not serve
            if self._model.attention == TRANSFORMERS:
                reason = str(error).strip().partition("\n")[0]
                raise UsageError(
                    f"model: {model_type_of(self._model)}: memory cannot be estimated: {reason}"
                ) from error
        self._model = replace(self._model, attention=TRANSFORMERS)
        whole = MetaModule(_build(self._model, *self._build_options), self.units)
        self._tracer = self._tracer_of(whole)
        return self._traced_pass(run, checkpointing, sizes)
