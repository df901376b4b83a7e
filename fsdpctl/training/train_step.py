"""The objects of a run, and one optimizer step that does not wait for the device."""

import contextlib
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.data_set import DataSet
from fsdpctl.engine.build import broadcast_buffers
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import LocalStepStats, SpikeLimits, StepRecord, record_step
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.plan.batch_plan import tokens_per_rank
from fsdpctl.run.step_metrics import ModelFlops, StepClock, StepMetrics, peak_memory
from fsdpctl.training.decoder_loss import SourceLosses, count_targets, summed_loss
from fsdpctl.training.learning_rate import lr_factor
from fsdpctl.training.script_loss import NamedSums, script_loss

if TYPE_CHECKING:  # the import of PyTorch's engines takes a second
    from fsdpctl.torch_engines.model import TorchEngineModel

Optimizer = ShardedAdamW | ShardedSGD  # ShardedMuon is a ShardedAdamW
TrainedModel: TypeAlias = "ShardedModel | TorchEngineModel"


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The process of a rank, as the training loop sees it."""

    stop_requested: Callable[[], bool]  # whether this rank received a stop signal
    started: float  # when the launch began, in seconds since the epoch
    # Called with a barrier function after the first step. Until then, a stop signal ends this rank
    # at once, because there is nothing to save.
    on_first_step: Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """The objects of a training run; assemble.py constructs them."""

    config: Config
    run_dir: Path
    data: DataSet
    model: TrainedModel
    optimizer: Optimizer
    train_batches: Batches
    val_batches: Batches | None
    device: torch.device
    named_sums: NamedSums = field(default_factory=NamedSums)  # sums of a script's loss


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device may still be computing."""

    step: int  # number of launched steps, including this one
    samples: int  # samples consumed, including this step
    tokens: int  # tokens in the samples of all ranks, without padding
    record: StepRecord
    limits: SpikeLimits  # the step is not applied if a value is higher
    lr: float
    clock: StepClock
    named_sums: tuple[str, ...]  # names of the sums of a script's loss


def launch_step(
    parts: TrainingParts,
    step: int,
    samples: int,
    *,
    limits: SpikeLimits,
    local_stats: Callable[[], LocalStepStats],
    is_traced: bool = False,
) -> LaunchedStep:
    """Launch the step after `step` launched steps and `samples` samples. Collective.

    The step is not applied if its values exceed `limits`. `local_stats()` is called after the
    backward passes and returns this rank's stop and save requests and gradient norm. While a
    profile is recorded (`is_traced`), nothing is prefetched for the next step: torch crashes if a
    trace ends between a prefetch and its use.
    """
    config = parts.config
    clock = StepClock(parts.device, parts.model.take_waits)
    record = run_passes(parts, step, samples, clock, limits=limits, local_stats=local_stats)
    assert config.optimizer.lr is not None
    assert config.train.steps is not None
    lr = config.optimizer.lr * lr_factor(config.lr_scheduler, step, config.train.steps)
    for group in parts.optimizer.param_groups:
        group["lr"] = lr
    # Backward divides by the nominal token count, which is known early; `grad_scale` corrects the
    # gradients to the real count, and clips them.
    parts.optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
    parts.optimizer.zero_grad()
    if config.model.is_script_module:  # all ranks get the statistics that a checkpoint saves
        broadcast_buffers(parts.model.module, parts.device, parts.model.collectives)
    clock.lap("optimizer")
    model, is_last = parts.model, step + 1 >= config.train.steps
    if not is_last and not is_traced and isinstance(model, ShardedModel) and model.can_prefetch:
        model.prefetch_forward_params()  # overlaps with the work between two steps
    samples_after = samples + config.train.global_batch_size
    tokens = parts.train_batches.count_tokens(samples)
    named = parts.named_sums.names or ()
    return LaunchedStep(step + 1, samples_after, tokens, record, limits, lr, clock, named)


def run_passes(
    parts: TrainingParts,
    step: int,
    samples: int,
    clock: StepClock,
    *,
    limits: SpikeLimits = SpikeLimits(),
    local_stats: Callable[[], LocalStepStats] = LocalStepStats,
) -> StepRecord:
    """Run the passes of a step, as in `launch_step`; return its record. Collective."""
    loss_sum, tokens, nominal, extra_sums = _run_micro_steps(parts, step, samples, clock)
    parts.model.sync_gradients()
    if parts.named_sums.names is not None:
        sums = parts.named_sums.take(parts.model.collectives, parts.device)  # collective at first
        extra_sums = torch.stack([sums, tokens.double().expand_as(sums)])
    stats = local_stats()
    return record_step(
        parts.model,
        loss_sum=loss_sum,
        tokens=tokens,
        nominal_tokens=nominal * parts.model.collectives.size,
        max_grad_norm=parts.config.optimizer.max_grad_norm,
        local_stats=LocalStepStats(stats.flags, stats.grad_norm, extra_sums),
        limits=limits,
    )


def finish_step(
    launched: LaunchedStep, device: torch.device, flops: ModelFlops, num_ranks: int
) -> StepMetrics:
    """Return the metrics of a launched step; waits for the device to complete it."""
    stats, times = launched.record.stats(), launched.clock.times()
    named = dict(zip(launched.named_sums, stats.source_losses, strict=False))
    return StepMetrics(
        launched.step, launched.samples, launched.tokens, stats, launched.lr, times,
        peak_memory(device), flops, num_ranks, named,
    )  # fmt: skip


def _run_micro_steps(
    parts: TrainingParts, step: int, samples: int, clock: StepClock
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Run forward and backward of every micro-batch.

    Returns the sum of the losses of target tokens in float64, the number of target tokens, the
    nominal token count by which losses were divided, and losses and tokens by source of a mixture.
    """
    config, plan = parts.config, parts.train_batches.plan
    rank = parts.model.collectives.rank
    length = tokens_per_rank(config.train.seq_len, plan.context_parallel)
    nominal = plan.micro_batch_size * plan.num_micro_batches * length
    loss_sum = torch.zeros((), dtype=torch.float64, device=parts.device)
    tokens = torch.zeros((), dtype=torch.int64, device=parts.device)
    sources = SourceLosses(parts.model.module, parts.train_batches, parts.device)
    for micro_step in range(plan.num_micro_batches):
        reseed(config.train.seed, step, micro_step, rank)
        batch = parts.train_batches.training(samples, rank, micro_step)
        clock.lap("data")
        is_last = micro_step == plan.num_micro_batches - 1
        skips_reduction = config.accumulation.name == "last" and not is_last
        with parts.model.no_sync() if skips_reduction else contextlib.nullcontext():
            chunk = config.train.loss_chunk_tokens or 0
            sources.start_forward()
            if batch.script_batch is not None:
                sums = parts.named_sums
                loss, count = script_loss(parts.model, batch.script_batch, parts.device, sums)
            else:
                loss = summed_loss(parts.model, batch, parts.device, chunk)
                count = count_targets(batch)
            sources.add(batch)
            (loss / nominal).backward()
        loss_sum += loss.detach()
        tokens += count
        clock.lap("compute")
    return loss_sum, tokens, nominal, sources.sums()


def reseed(*position: int) -> None:
    """Seed the generators of torch, Python and NumPy, all of which datasets of scripts may use.

    `position` is one in the run, such as seed, step, micro-batch and rank.
    """
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.manual_seed(seed >> 1)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
