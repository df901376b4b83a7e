"""Gradients of a small copy of a run's model: those of its ranks, and of one process."""

import re
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches, MicroBatch
from fsdpctl.data.streams import TokenStream
from fsdpctl.engine.blocks import prepare_blocks
from fsdpctl.engine.build import Sharding, Source
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.shard import shard_from
from fsdpctl.models.small_copy import VOCABULARY, draw, meta_copy, small_copy
from fsdpctl.plan.batch import plan_batches, tokens_per_rank
from fsdpctl.run.step_metrics import StepClock
from fsdpctl.training.loss import summed_loss
from fsdpctl.training.step import TrainingParts, run_passes

_LENGTH = 16
_MOST_PASSES = 2
_ROWS_AT_ONCE = 64


def compare_gradients(parts: TrainingParts, sharding: Sharding) -> tuple[float, float]:
    """Return the gradient norm of a step of ranks, and of one process with the same samples.

    Both are those of a small copy of the model with random weights and tokens, sharded by
    `sharding`, which is that of the model. Ranks share the samples as in the run. Collective.
    """
    config = _small_config(parts.config)
    assert isinstance(parts.model, ShardedModel)
    shared = config.train.context_parallel
    module = meta_copy(config.model)
    prepare_blocks(module, config)
    model = shard_from(Source(parts.device, draw), module, sharding, parts.model.mesh)
    model.train(False)
    ranks, passes = model.collectives.size, min(config.accumulation.steps or 1, _MOST_PASSES)
    plan = plan_batches(
        ranks // shared * passes, ranks, micro_batch_size=1, num_micro_batches=passes,
        context_parallel=shared,
    )  # fmt: skip
    stream = _stream(config, plan.global_batch_size * config.train.seq_len)
    batches = Batches(stream.rows(config.train.seq_len), plan, 0, VOCABULARY)
    small = replace(parts, config=config, model=model, train_batches=batches, val_batches=None)
    figures = run_passes(small, 0, 0, StepClock(parts.device, model.take_waits)).figures()
    model.drop_gradients()
    return figures.grad_norm, _alone(config, stream, parts.device)


def unused_units(parts: TrainingParts, units: set[str]) -> set[str]:
    """Return those of some units whose like has no gradient in the copy, as an image encoder."""
    if not units:
        return set()
    used: dict[str, bool] = {}  # of the copy's parameters, by name without the numbers of blocks
    for name, grad in _gradients(parts).items():
        used[_kind(name)] = used.get(_kind(name), False) or bool(grad.any())

    def is_unused(unit: str) -> bool:
        found = [each for name, each in used.items() if name.startswith(f"{_kind(unit)}.")]
        return bool(found) and not any(found)

    return set(filter(is_unused, units))


def _kind(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", "", name)


def _small_config(config: Config) -> Config:
    shared, chunk = config.train.context_parallel, config.train.loss_chunk_tokens
    # Every rank that shares a sample has a part of it, if that is possible.
    length = min(tokens_per_rank(_LENGTH, shared) * shared, config.train.seq_len)
    train = replace(
        config.train, seq_len=length, compile=False, mlp_chunk_tokens=0,
        loss_chunk_tokens=_LENGTH // 2 if chunk else 0,
    )  # fmt: skip
    model = replace(config.model, router_aux_loss="none")
    return replace(config, model=model, train=train)


def _stream(config: Config, num_tokens: int) -> TokenStream:
    """Return random tokens of the small copy, and the one after the last."""
    size = min(VOCABULARY, config.model.vocab_size or VOCABULARY)
    drawn = np.random.default_rng(0).integers(size, size=num_tokens + 1, dtype=np.uint16)
    return TokenStream(drawn, None)


def _gradients(parts: TrainingParts) -> dict[str, Tensor]:
    """Return the gradients of one sample in one process, in training."""
    config = _small_config(parts.config)
    module = small_copy(config.model, parts.device).train()
    stream = _stream(config, config.train.seq_len)
    tokens = torch.from_numpy(stream.tokens[:].astype(np.int64)).unsqueeze(0)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
    summed_loss(module, batch, parts.device, config.train.loss_chunk_tokens or 0).backward()
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in module.named_parameters()
    }


def _alone(config: Config, stream: TokenStream, device: torch.device) -> float:
    """Return the gradient norm of the mean loss over all targets.

    The loss is torch's, of all logits at once: with the functions of a run, a mistake in these
    would be on both sides.
    """
    module = small_copy(config.model, device)
    tokens = torch.from_numpy(stream.tokens[:].astype(np.int64)).to(device)
    rows = (each.view(-1, config.train.seq_len) for each in (tokens[:-1], tokens[1:]))
    for some, targets in zip(*(each.split(_ROWS_AT_ONCE) for each in rows), strict=True):
        logits = module(some).float().flatten(0, 1)
        F.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) / (len(tokens) - 1)
