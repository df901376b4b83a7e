"""A small copy of a run's model, on which the engine's gradients are compared with one process."""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.config.model import LoraConfig, ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches, MicroBatch
from fsdpctl.data.documents import IGNORED
from fsdpctl.data.tokens import TokenStream
from fsdpctl.engine.build import Sharding, Source
from fsdpctl.engine.describe import block_names
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.shard import shard_from
from fsdpctl.models.registry import build_plain
from fsdpctl.models.transformers_build import fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.batch import plan_batches
from fsdpctl.plan.context import tokens_per_rank
from fsdpctl.resolve.blocks import checkpoint_blocks
from fsdpctl.resolve.small_decoder import allocate, fill_unknown, small_decoder
from fsdpctl.run.step_metrics import StepClock
from fsdpctl.train.loss import summed_loss
from fsdpctl.train.step import TrainingParts, run_passes

_WIDTH, _VOCABULARY, _LENGTH = 64, 64, 16
_MOST_PASSES = 2
_ROWS_AT_ONCE = 64
_AUX_SHARE = 1e-6  # of the router's gradient; equal graphs differ by nothing


def compare_gradients(parts: TrainingParts, sharding: Sharding) -> tuple[float, float]:
    """Return the gradient norm of a step of ranks, and of one process with the same samples.

    Both are those of a small copy of the model with random weights and tokens, sharded by
    `sharding`, which is that of the model. Ranks share the samples as in the run. Collective.
    """
    config = _small_config(parts.config)
    assert isinstance(parts.model, ShardedModel)
    source = Source(parts.device, _draw)
    module = _module(config)
    about = config.activation_checkpointing
    if about.name != "none":
        blocks = list(map(module.get_submodule, block_names(module)))
        checkpoint_blocks(blocks, about.name, offload=about.offload)
    model = shard_from(source, module, sharding, parts.model.mesh)
    model.train(False)
    shared = config.train.context_parallel
    batches = _batches(config, model.collectives.size, shared)
    small = replace(parts, config=config, model=model, train_batches=batches, val_batches=None)
    clock = StepClock(parts.device, model.take_waits)
    figures = run_passes(small, 0, 0, clock).figures()
    model.drop_gradients()
    whole = _batches(config, model.collectives.size // shared)
    return figures.grad_norm, _alone(_plain(config, parts.device), whole, parts.device)


def has_auxiliary_gradient(parts: TrainingParts) -> bool:
    """Return whether the auxiliary loss of routers has a gradient, if it is part of the loss."""
    module = parts.model.module
    if not isinstance(module, TransformersDecoder) or not module.balances_experts:
        return True
    gradients = []
    config = _small_config(parts.config)
    batch, chunk = _batches(config, 1).training(0, 0, 0), config.train.loss_chunk_tokens or 0
    for aux in (parts.config.model.router_aux_loss, "none"):
        plain = _plain(_small_config(parts.config, aux), parts.device)
        summed_loss(plain, batch, parts.device, chunk).backward()
        gradients.append({n: p.grad for n, p in plain.named_parameters() if p.grad is not None})
    with_it, without = gradients
    if with_it.keys() != without.keys():
        return True
    pairs = ((grad, without[name]) for name, grad in with_it.items())
    return any((one - other).norm() > _AUX_SHARE * other.norm() for one, other in pairs)


def unused_units(parts: TrainingParts, units: set[str]) -> set[str]:
    """Return those of some units whose like has no gradient in the copy, as an image encoder."""
    if not units or not isinstance(parts.model.module, TransformersDecoder):
        return set()
    config = _small_config(parts.config)
    plain = _plain(config, parts.device)
    summed_loss(plain, _batches(config, 1).training(0, 0, 0), parts.device, 0).backward()
    used = {_kind(name) for name, param in plain.named_parameters() if param.grad is not None}
    known = {_kind(name) for name, _ in plain.named_parameters()}

    kinds = {unit: f"{_kind(unit)}." for unit in units}

    def holds(names: set[str], kind: str) -> bool:
        return any(each.startswith(kind) for each in names)

    return {unit for unit, kind in kinds.items() if holds(known, kind) and not holds(used, kind)}


def _kind(name: str) -> str:
    """Return a name without the numbers of blocks."""
    return re.sub(r"\.\d+(?=\.|$)", "", name)


def _small_config(config: Config, router_aux_loss: str = "none") -> Config:
    model = replace(
        config.model, init="random", path=None, lora=LoraConfig(), trainable=None, base_dtype=None,
        router_aux_loss=router_aux_loss,
    )  # fmt: skip
    if not model.is_foreign:
        model = _narrow(model, config.train.context_parallel)
    train = replace(
        config.train, seq_len=_sample_length(config), global_batch_size=1, micro_batch_size=1,
        compile=False, loss_chunk_tokens=_LENGTH // 2 if config.train.loss_chunk_tokens else 0,
    )  # fmt: skip
    return replace(config, model=model, train=train)


def _sample_length(config: Config) -> int:
    """Return a length of which every rank that shares a sample has a part, if that is possible."""
    shared = config.train.context_parallel
    return min(tokens_per_rank(_LENGTH, shared) * shared, config.train.seq_len)


def _narrow(model: ModelConfig, context_parallel: int) -> ModelConfig:
    heads = math.lcm(min(model.num_heads, 4), context_parallel)
    width = max(_WIDTH // heads // 2 * 2, 2)  # of a head; rotary embeddings turn pairs
    return replace(
        model, vocab_size=_VOCABULARY, num_layers=2, hidden_size=heads * width, head_dim=width,
        intermediate_size=_WIDTH, num_heads=heads,
        num_kv_heads=heads if model.num_kv_heads == model.num_heads else 1,
        sliding_window=None if model.sliding_window is None else _LENGTH // 2,
    )  # fmt: skip


def _module(config: Config) -> nn.Module:
    if not config.model.is_foreign:
        return build_plain(config.model)
    module, model = small_decoder(config.model)
    fill_buffers(module)
    fill_unknown(module, model)
    return module


def _plain(config: Config, device: torch.device) -> nn.Module:
    module = _module(config)
    allocate(module)
    with torch.no_grad():
        for name, param in module.named_parameters():
            _draw(name, param)
    return module.to(device)


def _draw(name: str, whole: Tensor) -> None:
    """Initialize a parameter by its name: of matrices, the outputs have the size of the inputs."""
    if whole.ndim <= 1:
        whole.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    std = whole.shape[-1] ** -0.5
    whole.copy_(torch.empty(whole.shape).normal_(0.0, std, generator=generator))


def _batches(config: Config, ranks: int, context_parallel: int = 1) -> Batches:
    """Return random samples: as many for each rank as it has passes, at most two."""
    passes = min(config.accumulation.steps or 1, _MOST_PASSES)
    plan = plan_batches(
        ranks // context_parallel * passes, ranks, micro_batch_size=1, num_micro_batches=passes,
        context_parallel=context_parallel,
    )  # fmt: skip
    length = config.train.seq_len
    count = plan.global_batch_size * length + 1
    tokens = np.random.default_rng(0).integers(_VOCABULARY, size=count, dtype=np.uint16)
    return Batches(TokenStream(tokens, None).rows(length), plan, 0, _VOCABULARY)


def _rows(batches: Batches) -> Iterator[MicroBatch]:
    """Yield all samples of the step, several at a time."""
    plan = batches.plan
    each = [
        batches.training(0, rank, micro_step)
        for rank in range(plan.world_size)
        for micro_step in range(plan.num_micro_batches)
    ]
    for start in range(0, len(each), _ROWS_AT_ONCE):
        some = each[start : start + _ROWS_AT_ONCE]
        tokens, targets = zip(*((one.tokens, one.targets) for one in some), strict=True)
        yield MicroBatch(torch.cat(tokens), torch.cat(targets))


def _alone(module: Any, batches: Batches, device: torch.device) -> float:
    """Return the gradient norm of the mean loss over all targets.

    The loss is torch's, of all logits at once: with the functions of a run, a mistake in these
    would be on both sides.
    """
    module.train(False)
    count = 0
    for batch in _rows(batches):
        logits = module(batch.tokens.to(device)).float().flatten(0, 1)
        targets = batch.targets.to(device).flatten()
        F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").backward()
        count += int((batch.targets != IGNORED).sum())
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) / count
