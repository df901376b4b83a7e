"""Models whose passes are traced on the meta device, with a few of their repeated blocks."""

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
_LONGEST_PERIOD = 12  # most blocks in a repeating pattern
_LAYER_INDICES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})

Run = Callable[[nn.Module], object]  # a forward and its backward; returns what outlives them
ByBlock = Mapping[str, BlockCheckpointing]  # checkpointing by name of the block


class MetaModule:
    """A module on the meta device, whose blocks are compared with one another."""

    def __init__(self, module: nn.Module, units: Sequence[UnitSpec]) -> None:
        self.module, self.units = module, units
        self.blocks = [unit.name for unit in units if unit.kind == "block"]
        # The index of the first equal block of each block, by the name of the ModuleList.
        self._kinds: dict[str, list[int]] = {}
        for parent, names in groupby(self.blocks, key=_parent):
            siblings = module.get_submodule(parent)
            members = [name.rpartition(".")[2] for name in names]
            if isinstance(siblings, nn.ModuleList) and members == list(siblings._modules):
                signatures = [_signature(block) for block in siblings]
                self._kinds[parent] = [signatures.index(each) for each in signatures]

    def kind(self, block: str) -> int:
        """Return the kind of a block: the index of the first equal block in its ModuleList."""
        parent, _, index = block.rpartition(".")
        return self._kinds[parent][int(index)]

    def repeated_units(self, by_block: ByBlock) -> list[RepeatedUnits]:
        """Return the repeated patterns of equal blocks with equal checkpointing."""
        repeated: list[RepeatedUnits] = []
        for parent, kinds in self._kinds.items():
            units = [f"{parent}.{index}" for index in range(len(kinds))]
            keys = [*zip(kinds, map(by_block.get, units), strict=True)]
            start = traced = 0
            while start < len(units):
                length, period = _first_repetition(keys[start:])
                count = num_traced(length, period)
                names = tuple(f"{parent}.{traced + index}" for index in range(count))
                repeated.append(RepeatedUnits(names, tuple(units[start : start + length]), period))
                start, traced = start + length, traced + count
        return repeated

    def shortened(self, repeated: Sequence[RepeatedUnits]) -> nn.Module:
        """Return a copy of the module with only the traced blocks of `repeated`.

        Deepcopy takes each shortened list from the memo, instead of a copy of the whole list.
        """
        memo: dict[int, Any] = {}
        for parent, of_list in groupby(repeated, key=lambda each: _parent(each.units[0])):
            siblings = self.module.get_submodule(parent)
            names = [name for each in of_list for name in each.units[: len(each.traced)]]
            blocks = [deepcopy(self.module.get_submodule(name), memo) for name in names]
            memo[id(siblings)] = short_list = copy(siblings)
            short_list._modules = {str(index): block for index, block in enumerate(blocks)}
        module = deepcopy(self.module, memo)
        if isinstance(module, TransformersDecoder):
            _shorten_config(module.transformers_model.config, repeated)
        return module


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _shorten_config(config: Any, repeated: Sequence[RepeatedUnits]) -> None:
    """Remove the entries of removed blocks from the lists of a config, in place.

    A model selects the mask of a block by the block's index in such a list.
    """
    names = [name for each in repeated for name in each.units[: len(each.traced)]]
    indices = [int(name.rpartition(".")[2]) for name in names]
    num_blocks = sum(len(each.units) for each in repeated)
    for values in vars(config).values():
        if isinstance(values, list) and len(values) == num_blocks:
            values[:] = [values[index] for index in indices]


def _first_repetition(kinds: Sequence[object]) -> tuple[int, int]:
    """Return length and period of the repetition from the first block that saves most blocks."""
    repetitions: list[tuple[int, int]] = []
    for period in range(1, min(_LONGEST_PERIOD, len(kinds)) + 1):
        equal = takewhile(bool, map(eq, kinds, kinds[period:]))
        repetitions.append((period + len(list(equal)), period))
    return max(repetitions, key=lambda each: each[0] - num_traced(*each))


def _signature(block: nn.Module) -> object:
    """Return a value that is equal for two blocks if they allocate equal memory."""
    signature: list[object] = []
    for name, module in block.named_modules():
        signature += [name, type(module)]
        for key, param in module._parameters.items():
            if param is not None:
                signature.append((key, tuple(param.shape), param.dtype, param.requires_grad))
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN) and key not in _LAYER_INDICES:
                signature.append((key, value))
    return signature


class PassTracer:
    """A tracer of passes through a module with only a few of its repeated blocks."""

    def __init__(
        self,
        module: MetaModule,
        *,
        dtype: torch.dtype | None,
        device: str,
        kernel: str | None = None,
    ) -> None:
        """Trace operators of `device` that compute in `dtype`; None: in the parameters' dtype."""
        self._module, self._dtype = module, dtype
        self._device, self._kernel = device, kernel
        self._passes: dict[object, TracedPass] = {}

    def model_pass(
        self, run: Run, checkpointing: ActivationCheckpointingConfig, key: object = None
    ) -> ModelPass:
        """Return a pass through the whole model, with its blocks prepared as for training.

        Runs with an equal `key` are equal.
        """
        blocks = self._module.blocks
        by_block = dict(zip(blocks, checkpointing.per_block(len(blocks)), strict=True))
        repeated = self._module.repeated_units(by_block)
        traced = self._pass(run, repeated, by_block, key)
        if not all(each.is_regular(traced) for each in repeated):
            repeated = []
            traced = self._pass(run, repeated, by_block, key)
        return ModelPass(traced, [unit.name for unit in self._module.units[1:]], repeated)

    def _pass(
        self, run: Run, repeated: Sequence[RepeatedUnits], by_block: ByBlock, key: object
    ) -> TracedPass:
        """Return the pass of a run; trace it unless an equal pass has been traced."""
        names = {
            name: each.traced[each.representative(index)]
            for each in repeated
            for index, name in enumerate(each.units)
        }
        by_traced = {names.get(name, name): each for name, each in by_block.items()}
        copied = [name for each in repeated for name in each.units[: len(each.traced)]]
        full_key = (tuple(by_traced.items()), tuple(map(self._module.kind, copied)), key)
        if full_key not in self._passes:
            self._passes[full_key] = self._trace(run, repeated, by_traced)
        return self._passes[full_key]

    def _trace(self, run: Run, repeated: Sequence[RepeatedUnits], by_block: ByBlock) -> TracedPass:
        module = self._module.shortened(repeated)
        blocks = [module.get_submodule(name) for name in by_block]
        inputs = checkpoint_blocks(blocks, [*by_block.values()])
        for param in module.parameters():
            if self._dtype is not None and param.is_floating_point():
                param.data = param.data.to(self._dtype)
        others = (unit.name for unit in self._module.units[1:] if unit.kind != "block")
        units = [*by_block, *others]
        traced = trace(module, units, lambda: run(module), self._device, self._kernel)
        sizes = {name: inputs.sizes.get(n, 0) for n, name in enumerate(by_block)}
        return replace(traced, offloaded={name: size for name, size in sizes.items() if size})


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on the meta device, and its numbers of parameters."""

    module: MetaModule
    num_params: int
    num_active: int
    num_trained: int


def _build(config: ModelConfig, chunk_tokens: int, emulated: EmulatedProgram) -> nn.Module:
    module = build_model(config, transformers_norms=emulated.transformers_norms)
    chunk_feed_forward(module, chunk_tokens)
    if emulated.fused_experts:
        fuse_experts(module)
    return module


@lru_cache(maxsize=8)
def _build_cached(config: ModelConfig, chunk_tokens: int, emulated: EmulatedProgram) -> BuiltModel:
    """Return a cached model, which callers must not change."""
    module = _build(config, chunk_tokens, emulated)
    return BuiltModel(
        module=MetaModule(module, module_units(module, classes=None)),
        num_params=sum(count_weights(module).values()),
        num_active=count_active_parameters(module),
        num_trained=sum(each.numel() for each in module.parameters() if each.requires_grad),
    )


class TracedModel:
    """The model of a configuration, traced for any micro-batch size and sequence length."""

    def __init__(self, config: Filled) -> None:
        """Build the model on the meta device; UsageError if its sizes conflict."""
        self._model = config.model
        self._build_options = config.train.mlp_chunk_tokens or 0, config.engine.emulated
        built = _build_cached(config.model, *self._build_options)
        self.units, self.num_trained = tuple(built.module.units), built.num_trained
        self.num_params, self.num_active = built.num_params, built.num_active
        self.num_blocks = len(built.module.blocks)
        is_cuda = config.launch.device == "cuda"
        self.packages = packages_of(built.module.module) if is_cuda else ()
        self._dtype = torch_dtype(str(config.precision.param_dtype))
        self._kernel = kernel_of(config)
        self._holds_documents = config.data.masks_documents
        self._device = str(config.launch.device)
        size = config.train.context_parallel
        self._context = None if size == 1 else ContextParallel(size, 0)
        self._keeps_logits = config.engine.emulated.keeps_logits
        self._model_passes: dict[object, ModelPass] = {}
        self._tracer = self._tracer_of(built.module)

    def _tracer_of(self, module: MetaModule) -> PassTracer:
        return PassTracer(module, dtype=self._dtype, device=self._device, kernel=self._kernel)

    def model_pass(
        self,
        micro_batch_size: int,
        seq_len: int,
        chunk_tokens: int,
        checkpointing: ActivationCheckpointingConfig,
    ) -> ModelPass:
        """Return a pass over `micro_batch_size` samples with `seq_len` tokens each on a rank.

        The loss is computed in chunks of `chunk_tokens`; 0: of all tokens at once. UsageError if
        the model has fewer blocks than `checkpointing` names.
        """
        logits: list[Tensor] = []  # outlive a pass if the emulated program keeps them

        def run(module: nn.Module) -> Tensor:
            tokens = torch.empty(micro_batch_size, seq_len, dtype=torch.int64)
            targets = torch.empty_like(tokens)
            options = {}
            if self._holds_documents or self._context is not None:
                size = seq_len * (1 if self._context is None else self._context.size)
                options["documents"] = assumed_documents(
                    micro_batch_size,
                    size,
                    self._device,
                    context=self._context,
                    one_per_row=not self._holds_documents,
                )
            if self._keeps_logits and not chunk_tokens:
                logits[:] = [module(tokens, **options).float()]
                loss = F.cross_entropy(logits[0].flatten(0, -2), targets.flatten(), reduction="sum")
            else:
                loss = module(tokens, targets, chunk_tokens or None, **options)
            (loss / tokens.numel()).backward()
            return loss

        sizes = (micro_batch_size, seq_len, chunk_tokens)
        if (key := (sizes, checkpointing)) not in self._model_passes:
            code_pairs.cache_clear()  # so that the first pass allocates the table of code pairs
            import_kernels(self._device)
            checkpointing.per_block(self.num_blocks)  # UsageError if it names more blocks
            self._model_passes[key] = self._traced_pass(run, checkpointing, sizes)
        return self._model_passes[key]

    def _traced_pass(
        self, run: Run, checkpointing: ActivationCheckpointingConfig, sizes: object
    ) -> ModelPass:
        try:
            return self._tracer.model_pass(run, checkpointing, sizes)
        except Exception as error:  # fsdpctl's attention may not support the family's code
            if self._model.attention == TRANSFORMERS:
                cause = str(error).strip().partition("\n")[0]
                problem = f"memory cannot be estimated: {cause}"
                raise UsageError(f"model: {model_type_of(self._model)}: {problem}") from error
        # Trace this pass and later passes with the family's own attention.
        self._model = replace(self._model, attention=TRANSFORMERS)
        module = MetaModule(_build(self._model, *self._build_options), self.units)
        self._tracer = self._tracer_of(module)
        return self._traced_pass(run, checkpointing, sizes)
