"""The estimated peak of all tensors matches a real run, and the engine's bytes are exact."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdpctl.comm import process_group
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Resolved
from fsdpctl.engine.offloaded_inputs import host_inputs_bytes
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.planned_steps import plan_training
from fsdpctl.plan.batch_plan import tokens_per_rank
from fsdpctl.plan.buffers import planned_step
from fsdpctl.plan.optimizers import tile_bytes
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.schedule import BufferKind, Event, EventKind
from fsdpctl.plan.step_plan import Transport
from fsdpctl.predict import fsdpctl_update
from fsdpctl.predict.fsdpctl_steps import FsdpctlSteps
from fsdpctl.predict.memory_recorder import MemoryRecorder
from fsdpctl.predict.peak import AllocationTrace, find_peak
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.run_plan import make_run_plan, stored_config
from fsdpctl.training.assemble import enable_context_parallel, make_model, make_optimizer
from tests.distributed import distributed
from tests.engine.nccl import nccl_path
from tests.matrix import WHOLE, fast
from tests.predict.random_configs import random_config
from tests.predict.tensor_bytes import host_inputs, watched_step
from tests.train_step import train_step

CASES = 60  # for each number of ranks
SAMPLED = range(5, 8)


def predicted(
    config: Resolved, rank: int, model: ShardedModel, transport: Transport | None = None
) -> tuple[int, list[Event], int]:
    """Return the estimated peak of all tensors, the planned events, and the bytes of states.

    States are optimizer states, and all model states in host memory. Also check the bytes of the
    block inputs that `model` offloads to host memory.
    """
    run = make_run_plan(config)
    traced, steps = Estimator().traced_model(run.config), run.batches.num_micro_batches
    micro = run.batches.micro_batch_size
    plan = plan_training(run.config, traced.units, steps)
    replica, rank_in_replica = divmod(rank, plan.step_plan.position.num_shards)
    plan = plan.at(rank_in_replica, replica)
    if transport is not None:
        position = replace(plan.step_plan.position, transport=transport)
        plan = replace(plan, step_plan=replace(plan.step_plan, position=position))
    assert plan.step_plan == model._runtime.plan, config
    last = traced.units[-1]
    chunk = run.config.train.loss_chunk_tokens or 0
    length = tokens_per_rank(config.train.seq_len, config.train.context_parallel)
    model_pass = traced.model_pass(micro, length, chunk, config.activation_checkpointing)
    inputs = host_inputs(model)
    on_host = inputs.buffers.nbytes if inputs else 0
    assert host_inputs_bytes(model_pass.offloaded.values()) == on_host, config
    recorder = MemoryRecorder(model_pass, last.name, last_is_head=last.kind == "head")
    trace = AllocationTrace(recorder, FsdpctlSteps(plan, recorder), draws=False, cuda=False)
    peak = sum(find_peak(trace, recorder.purpose, 1).breakdown.values())
    states = plan.host_model_bytes
    if not plan.step_plan.steps_on_host:
        states += plan.states_bytes
    reduces = (*plan.reduces_gradients[:1] * (steps - 1), True)
    return peak, planned_step(plan.step_plan, reduces), states


def check(config: Resolved, rank: int, transport: Transport | None = None) -> tuple[int, int]:
    """Return the estimated and the real peak of all tensors in a step.

    Check the bytes that the engine allocates, event by event, and the bytes of optimizer states.
    """
    cpu = torch.device("cpu")
    model = make_model(config, cpu, trains=True)
    if transport is None:
        enable_context_parallel(cpu, model.collectives.size, config.train.context_parallel)
    if transport is Transport.NCCL:  # fake collectives compute no sums
        model._step_check._check = lambda *_: None  # type: ignore[method-assign]
    model.overlap_param_gather = model.host is not None
    optimizer = make_optimizer(config, model)
    peak, events = watched_step(model, partial(train_step, config, model, optimizer))
    expected, planned, states = predicted(config, rank, model, transport)
    assert events[: len(planned)] == planned, config
    if model.host is None:  # the optimizer's step and the end of the gradients follow
        rest = events[len(planned) :]
        assert all(e.kind is EventKind.SYNC or e.buffer is BufferKind.GRADS for e in rest), config
    assert optimizer.memory_bytes() + model.host_memory_bytes() == states, config
    assert abs(expected / peak - 1) <= 0.01, (expected, peak, config)
    return expected, peak


def peaks_of(rank: int, ranks: int, seed: int) -> tuple[int, int]:
    """Return the estimated and the real peak in a step of a random configuration."""
    return check(random_config(random.Random(f"{seed} {ranks}"), ranks), rank)


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    """Use collectives that do nothing, so that none of their threads holds memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    on_cpu = mock.patch.object(
        fsdpctl_update, "tile_bytes", lambda largest, _, dtype: tile_bytes(largest, "cpu", dtype)
    )
    try:
        repeat = mock.patch.object(process_group, "all_gather_values", lambda x, _: [x] * ranks)
        with repeat, on_cpu:
            yield
    finally:
        dist.destroy_process_group()


@WHOLE
@pytest.mark.parametrize("ranks", fast(2, slow=[4, 12]))
def test_estimates_are_exact_over_nccl(ranks: int, whole: bool) -> None:
    """Over NCCL, gradients are collected first, and embeddings are reduced in pieces."""
    for seed in range(CASES) if whole else SAMPLED[:1]:
        config = random_config(random.Random(f"nccl {seed} {ranks}"), ranks, on_gloo=False)
        rank = seed % ranks
        with fake_group(rank, ranks), nccl_path():
            check(config, rank, Transport.NCCL)


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3, 4]))
@distributed(timeout=600)
def test_engine_bytes_are_exact_and_the_peak_of_all_tensors_within_a_percent(
    rank: int, world_size: int, whole: bool
) -> None:
    for seed in range(CASES) if whole else SAMPLED:
        peaks_of(rank, world_size, seed)


@pytest.mark.parametrize("more", [
    "precision=fp32 strategy.offload=states,gradients",
    f"precision.master_dtype={SPLIT} strategy.offload=states",
    f"precision.master_dtype={SPLIT} strategy.offload=all precision.reduce_dtype=bfloat16",
    "optimizer.state_dtype=int8 strategy.offload=states,params precision=bf16",
    f"optimizer.state_dtype=int8 strategy.offload=all precision.master_dtype={SPLIT}",
    "optimizer.state_dtype=int8 strategy.offload=all model.lora.rank=4 model.base_dtype=nf4",
])  # fmt: skip
def test_engine_bytes_of_states_on_the_host_are_exact(more: str) -> None:
    args = [
        "launch.device=cpu", "launch.nproc_per_node=1", "model.num_layers=4",
        "model.hidden_size=64", "model.intermediate_size=96", "model.num_heads=1",
        "model.num_kv_heads=1", "model.vocab_size=65", "train.seq_len=128",
        "train.micro_batch_size=4", "train.global_batch_size=8", "accumulation.steps=2",
        "accumulation=every",
    ]  # fmt: skip
    check(stored_config(assign_ranks(compose_config([*args, *more.split()]).config)), 0)


@pytest.mark.parametrize("mode", fast("full", slow=["selective"]))
def test_two_inputs_of_recomputed_blocks_stay_on_the_device(mode: str) -> None:
    args = [
        "launch.device=cpu", "launch.nproc_per_node=1", "precision=fp32", "model.num_layers=8",
        "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=1",
        "model.num_kv_heads=1", "model.vocab_size=64", "train.seq_len=128", "accumulation.steps=1",
        "train.micro_batch_size=4", "train.global_batch_size=4", "model.trainable=norm",
        f"activation_checkpointing={mode}",
    ]  # fmt: skip
    results = []
    for offload in ("false", "true"):
        typed = [*args, f"activation_checkpointing.offload={offload}"]
        config = stored_config(assign_ranks(compose_config(typed).config))
        model = make_model(config, torch.device("cpu"))
        optimizer = make_optimizer(config, model)
        peak, _ = watched_step(model, partial(train_step, config, model, optimizer))
        results.append((peak, predicted(config, 0, model)[0]))
    (before, planned_before), (after, planned) = results
    six = (8 - 2) * 4 * 128 * 32 * 4  # bytes
    assert 0.99 * six <= before - after == planned_before - planned <= six
