"""Checks that the first step of a start did what the configuration says."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.comm.flat_shard import integer_view
from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches, MicroBatch
from fsdpctl.data.packing import IGNORE_INDEX
from fsdpctl.data.streams import TokenStream
from fsdpctl.engine.blocks import prepare_blocks
from fsdpctl.engine.build import Sharding, WeightInit
from fsdpctl.engine.shard_model import shard_from
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import SelfCheckError
from fsdpctl.io.activity import doing
from fsdpctl.models.module_spec import block_names
from fsdpctl.models.small_copy import VOCABULARY, init_by_name, meta_copy, small_copy
from fsdpctl.models.transformers_decoder import eval_mode
from fsdpctl.plan.batch_plan import plan_batches, tokens_per_rank
from fsdpctl.plan.recomputation import BLOCKS, one_of_each
from fsdpctl.run.step_metrics import StepClock, StepMetrics
from fsdpctl.training.decoder_loss import summed_loss
from fsdpctl.training.requests import RequestFlags
from fsdpctl.training.train_step import TrainedModel, TrainingParts, run_passes
from fsdpctl.training.trainer import Callback, Trainer

_LEAK_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3}  # relative to the loss of a document
_NUM_SUMS = 1024  # changes of many weights may cancel out in one sum, but not in all sums
_NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # relative
_LENGTH = 16
_MOST_PASSES = 2
_ROWS_AT_ONCE = 64


class SelfCheck(Callback):
    """A callback that checks the first step of a start, and stops the run if it is wrong.

    It warns if the first step that is applied with a learning rate above 0 changes no weight.
    """

    def __init__(self, mode: str, first_step: int, sharding: Sharding) -> None:
        """Check the step after `first_step`; `mode` is the value of `train.self_check`."""
        self._sharding, self._mode = sharding, mode
        self._checked_step = first_step + 1 if mode != "off" else -1
        self._norms: dict[str, Tensor] = {}  # gradient norms by unit
        self._tokens = 0
        self._awaits_change = mode != "off"
        self._before: list[Tensor] = []  # sums of the weights before the newest step
        self._lr = 0.0  # learning rate of the newest step; 0 if the step was not applied

    def inspect_gradients(self, trainer: Trainer) -> None:
        if self._awaits_change:
            self._before = _bit_sums(trainer.parts.model)
        if self._norms or trainer.step + 1 != self._checked_step:
            return
        for shard in filter(lambda each: each.trainable, trainer.parts.model.flat_shards()):
            if shard.offloaded_grad is not None:
                norm = shard.offloaded_grad.norm
            elif shard.grad is not None:
                norm = torch.linalg.vector_norm(shard.grad, dtype=torch.float32)
            else:
                continue
            # Norms are only compared with 0, so their sum serves.
            self._norms[shard.unit] = norm + self._norms.get(shard.unit, 0)

    def is_due(self, step: int) -> bool:
        """Return whether `step` is the one to check, or no weight has changed so far.

        With a learning rate of 0 at first, the host waits for the device after each step.
        """
        return step == self._checked_step or self._awaits_change

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self._lr = metrics.lr if metrics.stats.was_applied else 0.0
        if metrics.step == self._checked_step:
            self._tokens = metrics.stats.tokens

    def act(self, trainer: Trainer, requested: RequestFlags) -> RequestFlags:
        """Run the checks and print errors; SelfCheckError if `train.self_check` is `auto`."""
        if not trainer.has_due_work(self):
            return requested
        began, errors = time.perf_counter(), list[str]()
        warnings, is_first = self._take_warnings(trainer), trainer.step == self._checked_step
        if is_first:
            self._checked_step = -1
            with doing("checking the first step"):
                errors = list(dict.fromkeys(self._errors(trainer)))
        if is_first or warnings:
            trainer.journal.update_start_record({"self_check": [*errors, *warnings]})
        for line in (*errors, *warnings):
            trainer.journal.say(f"self-check: {line}")
        if errors and self._mode == "auto":
            problem = f"{errors[0]}; set train.self_check=warn to train nevertheless"
            raise SelfCheckError(f"train.self_check: {problem}")
        if is_first and not (errors or warnings):
            trainer.journal.remark(f"self-check: passed ({time.perf_counter() - began:.1f} s)")
        return requested

    def _take_warnings(self, trainer: Trainer) -> list[str]:
        """Return a warning, once, if the step changed no weight although it should. Collective."""
        if not self._awaits_change or self._lr <= 0:
            return []
        self._awaits_change = False
        pairs = zip(self._before, _bit_sums(trainer.parts.model), strict=True)
        changed = any(not torch.equal(before, after) for before, after in pairs)
        if any(trainer.collectives.all_gather_values(changed)):
            return []
        applied = f"step {trainer.step} was applied with a learning rate of {self._lr:g}"
        hint = "set a higher optimizer.lr, or precision.master_dtype=float32"
        return [f"warning: {applied}, but changed no weight; {hint}"]

    def _errors(self, trainer: Trainer) -> Iterator[str]:
        """Yield the errors of the first step, the same on every rank. Collective."""
        if not self._tokens:
            yield "no token of the step is trained on"
            return
        model, config = trainer.parts.model, trainer.parts.config
        if config.model.is_script_module:  # a script's module has no small copy
            return
        with_gradient = {unit for unit, norm in self._norms.items() if norm}
        units = {s.unit for s in model.flat_shards() if s.trainable}
        units -= set().union(*trainer.collectives.all_gather_values(with_gradient))
        for unit in sorted(units - unused_units(trainer.parts, units)):
            yield f"{unit or 'the root'}: no parameter has a gradient"
        # On CUDA, attention kernels mask documents, rather than a mask that fsdpctl builds.
        if trainer.parts.device.type == "cuda":
            yield from _find_leaks(trainer)
        if isinstance(model, ShardedModel):
            norm, expected = compare_gradients(trainer.parts, self._sharding)
            tolerance = _NORM_TOLERANCE[str(config.precision.param_dtype)] * expected
            if not abs(norm - expected) <= tolerance:  # not `>`: NaN must fail
                copy = f"a small copy of the model on {trainer.collectives.size} ranks"
                expected_text = f"expected {expected:.6g}, as on one process"
                yield f"gradient norm {norm:.6g} of {copy}; {expected_text}"


def _bit_sums(model: TrainedModel) -> list[Tensor]:
    """Return checksums of each trained shard: `_NUM_SUMS` strided sums of its bits, and a rest."""
    shards = [shard for shard in model.flat_shards() if shard.trainable]
    tensors = [tensor for shard in shards for tensor in (shard.master, shard.remainder)]
    sums = []
    for bits in (integer_view(tensor) for tensor in tensors if tensor is not None):
        end = len(bits) // _NUM_SUMS * _NUM_SUMS
        sums += [bits[:end].view(-1, _NUM_SUMS).sum(0, dtype=torch.int64), bits[end:].clone()]
    return sums


@torch.no_grad()
def _find_leaks(trainer: Trainer) -> list[str]:
    """Return an error if a packed document sees another document of its sequence. Collective."""
    parts = trainer.parts
    if parts.config.data.packing is False:  # each sequence has one document
        return []
    batches = parts.train_batches
    position = trainer.samples - batches.plan.global_batch_size
    batch = batches.training(position, trainer.collectives.rank, micro_step=0)
    packed = enumerate(batch.lengths if batch.isolates_documents else ())
    row = next((row for row, lengths in packed if len(lengths) > 1), None)
    if not any(trainer.collectives.all_gather_values(row is not None)):
        return []
    # Only the last document of a row has a loss, which must not change with tokens before it.
    targets, changed_tokens = torch.full_like(batch.targets, IGNORE_INDEX), batch.tokens.clone()
    if row is not None:
        *before, last = batch.lengths[row]
        start, stop = batch.index_of(sum(before)), batch.index_of(sum(before) + last)
        targets[row, start:stop] = batch.tokens[row, start:stop]
        changed_tokens[row, :start] = (changed_tokens[row, :start] + 1) % batches.vocab_size
    losses, chunk = [], parts.config.train.loss_chunk_tokens or 0
    for tokens in (batch.tokens, changed_tokens):
        probe = replace(batch, tokens=tokens, targets=targets)
        with eval_mode(parts.model):
            losses.append(float(summed_loss(parts.model, probe, parts.device, chunk)))
    limit = _LEAK_TOLERANCE[str(parts.config.precision.param_dtype)] * abs(losses[0])
    leaks = row is not None and abs(losses[1] - losses[0]) > limit
    if not any(trainer.collectives.all_gather_values(leaks)):
        return []
    return ["packed documents attend to each other; set data.packing=false"]


def compare_gradients(parts: TrainingParts, sharding: Sharding) -> tuple[float, float]:
    """Return the gradient norm of a step on all ranks, and in one process with the same samples.

    Both steps use a small copy of the model with random weights and tokens. The copy on all
    ranks is sharded by `sharding`, and ranks share samples as in the run. Collective.
    """
    config = _small_config(parts.config)
    assert isinstance(parts.model, ShardedModel)
    context_parallel = config.train.context_parallel
    module = meta_copy(config.model)
    blocks = one_of_each(config.activation_checkpointing.blocks, len(block_names(module)))
    prepare_blocks(module, config.changed({BLOCKS: blocks}))
    model = shard_from(WeightInit(parts.device, init_by_name), module, sharding, parts.model.mesh)
    model.train(False)
    ranks, passes = model.collectives.size, min(config.accumulation.steps or 1, _MOST_PASSES)
    plan = plan_batches(
        ranks // context_parallel * passes, ranks, micro_batch_size=1, num_micro_batches=passes,
        context_parallel=context_parallel,
    )  # fmt: skip
    stream = _stream(config, plan.global_batch_size * config.train.seq_len)
    batches = Batches(stream.samples(config.train.seq_len), plan, seed=0, vocab_size=VOCABULARY)
    small_parts = replace(parts, config=config, model=model, train_batches=batches)
    clock = StepClock(parts.device, model.take_waits)
    stats = run_passes(small_parts, step=0, samples=0, clock=clock).stats()
    model.drop_gradients()
    return stats.grad_norm, _single_process_norm(config, stream, parts.device)


def unused_units(parts: TrainingParts, units: set[str]) -> set[str]:
    """Return the units whose counterpart in the small copy gets no gradient: an image encoder."""
    if not units:
        return set()
    is_used: dict[str, bool] = {}  # parameters of the copy, by name without block numbers
    for name, grad in _small_copy_gradients(parts).items():
        name = _without_block_numbers(name)
        is_used[name] = is_used.get(name, False) or bool(grad.any())

    def is_unused(unit: str) -> bool:
        prefix = f"{_without_block_numbers(unit)}."
        are_used = [each for name, each in is_used.items() if name.startswith(prefix)]
        return bool(are_used) and not any(are_used)

    return set(filter(is_unused, units))


def _without_block_numbers(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", "", name)


def _small_config(config: Config) -> Config:
    group, chunk = config.train.context_parallel, config.train.loss_chunk_tokens
    # If possible, every rank that shares a sample has a part of it.
    length = min(tokens_per_rank(_LENGTH, group) * group, config.train.seq_len)
    changes = {"seq_len": length, "compile": False, "mlp_chunk_tokens": 0}
    changes["loss_chunk_tokens"] = _LENGTH // 2 if chunk else 0
    values = {f"train.{name}": value for name, value in changes.items()}
    return config.changed({**values, "model.router_aux_loss": "none"})


def _stream(config: Config, num_tokens: int) -> TokenStream:
    size = min(VOCABULARY, config.model.vocab_size or VOCABULARY)
    tokens = np.random.default_rng(0).integers(size, size=num_tokens + 1, dtype=np.uint16)
    return TokenStream(tokens, num_bytes=None)


def _small_copy_gradients(parts: TrainingParts) -> dict[str, Tensor]:
    config = _small_config(parts.config)
    module = small_copy(config.model, parts.device).train()
    stream = _stream(config, config.train.seq_len)
    tokens = torch.from_numpy(stream.tokens[:].astype(np.int64)).unsqueeze(0)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
    summed_loss(module, batch, parts.device, config.train.loss_chunk_tokens or 0).backward()
    params = module.named_parameters()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in params}


def _single_process_norm(config: Config, stream: TokenStream, device: torch.device) -> float:
    """Return the gradient norm of the mean loss over all targets.

    The loss is torch's cross entropy over all logits. With fsdpctl's loss functions, a mistake in
    them would be on both sides of the comparison.
    """
    module = small_copy(config.model, device)
    tokens = torch.from_numpy(stream.tokens[:].astype(np.int64)).to(device)
    rows = (each.view(-1, config.train.seq_len) for each in (tokens[:-1], tokens[1:]))
    for inputs, targets in zip(*(each.split(_ROWS_AT_ONCE) for each in rows), strict=True):
        logits = module(inputs).float().flatten(0, 1)
        F.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) / (len(tokens) - 1)
