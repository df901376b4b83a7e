"""Runs a step like that of the trainer, on random tokens."""

from contextlib import nullcontext

import torch

from fsdpctl.config.schema import Config
from fsdpctl.data.batches import MicroBatch
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.record import record_step
from fsdpctl.plan.batch_plan import ContextParallel, tokens_per_rank
from fsdpctl.resolve.run_plan import make_run_plan, stored_config
from fsdpctl.training.decoder_loss import summed_loss
from fsdpctl.training.train_step import Optimizer


def train_step(
    config: Config, model: ShardedModel, optimizer: Optimizer,
    device: torch.device = torch.device("cpu"),
) -> None:  # fmt: skip
    """Run all micro-batches of a step, record it, and step the optimizer."""
    chunk = make_run_plan(stored_config(config)).config.train.loss_chunk_tokens or 0
    steps, samples = config.accumulation.steps, config.train.micro_batch_size
    assert steps is not None
    assert samples is not None
    shared = config.train.context_parallel
    shape = (samples, tokens_per_rank(config.train.seq_len, shared))
    context = None if shared == 1 else ContextParallel(shared, model.collectives.rank % shared)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for micro_step in range(steps):
        tokens = torch.randint(0, config.model.vocab_size or 1, shape)
        lengths = _documents(config, (samples, shape[1] * shared))
        batch = MicroBatch(tokens, tokens.clone(), lengths, context, config.data.masks_documents)
        holds = config.accumulation.name == "last" and micro_step < steps - 1
        with model.no_sync() if holds else nullcontext():
            loss = summed_loss(model, batch, device, chunk)
            (loss / tokens.numel()).backward()
        loss_sum += loss.detach()
    record = record_step(
        model, loss_sum=loss_sum, tokens=torch.ones((), device=device), nominal_tokens=1,
        max_grad_norm=1.0,
    )  # fmt: skip
    optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
    optimizer.zero_grad()


def _documents(config: Config, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return documents of different lengths: three per row, or one in rows that ranks share."""
    rows, length = shape
    if not config.data.masks_documents:
        return ((length,),) * rows if config.train.context_parallel > 1 else ()
    return ((1, length // 3, length - 1 - length // 3),) * rows
