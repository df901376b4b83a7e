"""The optimizer's step on the host: expected times, the order of units, and copied bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdpctl.config.compose import compose_config
from fsdpctl.engine.host_worker import Copier
from fsdpctl.estimate.estimator import Estimator, StepPrediction
from fsdpctl.estimate.planned_steps import plan_training
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.step_plan import HOST_SCALARS
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.predict.hardware import HostDataSheet, HostQueue
from fsdpctl.predict.model_pass import Work
from fsdpctl.predict.simulator import Transfer
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan
from fsdpctl.training.assemble import make_model, make_optimizer
from tests.distributed import distributed, in_turn
from tests.predict.test_properties import Free, Instant, Plain, on
from tests.predict.timeline import COMPUTE, Timeline, TimelineSpan, spans
from tests.train_step import train_step

DOWN, STEPS, UP = HostQueue
SMALL = (
    "model.num_layers=4 model.hidden_size=32 model.intermediate_size=64 model.num_heads=2 "
    "model.num_kv_heads=2 model.vocab_size=64 train.seq_len=16 train.micro_batch_size=1 "
    "launch.nproc_per_node=2 train.global_batch_size=2"
)
SHARDING = [name for name, row in STRATEGIES.items() if row.shards_optimizer]
SYNCING = [name for name in SHARDING if STRATEGIES[name].syncs_params]
PREDICTOR = Estimator()


def planned(args: str) -> RunPlan:
    named = {arg.partition("=")[0]: arg for arg in (*SMALL.split(), *args.split())}
    return make_run_plan(prepare(compose_config(list(named.values())), ESTIMATE_ROLE).config)


def predicted(args: str) -> StepPrediction:
    return PREDICTOR.predict(planned(args))


def owned(args: str) -> list[int]:
    """Return the elements of each unit that a rank steps, in the order of the forward."""
    run = planned(args)
    plan = plan_training(run.config, PREDICTOR.traced_model(run.config).units, 1).step_plan
    return [
        sum(plan.master_span(each).numel for each in plan.layouts[unit])
        for unit in (plan.order.root, *plan.order.forward)
    ]


@dataclass(frozen=True)
class Even(Free):
    """A device on which operators take equal time, and copies and the optimizer no time."""

    per_operator: float = 1e-3

    def seconds(self, work: Work) -> float:
        return self.per_operator


@dataclass(frozen=True)
class Host:
    """A host with a rate in bytes/s for each queue."""

    down: float = 1e18
    steps: float = 1e18
    up: float = 1e18

    def transfer(self, queue: HostQueue, nbytes: float) -> Transfer:
        rate = {DOWN: self.down, STEPS: self.steps, UP: self.up}[queue]
        return Transfer(queue, 0.0, nbytes / rate, 0.0 if queue is STEPS else nbytes)


def on_host(monkeypatch: pytest.MonkeyPatch, host: Host, device: Free, network: object) -> None:
    on(monkeypatch, device, network)
    monkeypatch.setattr("fsdpctl.estimate.estimator.StepSimulator", Timeline)
    monkeypatch.setattr("fsdpctl.estimate.estimator.host_of", lambda config: host)


@pytest.mark.parametrize("strategy", SHARDING)
@pytest.mark.parametrize("offload", ["states", "states,gradients"])
def test_a_host_that_takes_no_time_costs_nothing(strategy, offload, monkeypatch):
    args = f"cluster=h100 strategy={strategy}"
    on_host(monkeypatch, Host(), Even(), Instant())
    prediction = predicted(f"{args} strategy.offload={offload}")
    assert prediction.seconds == pytest.approx(predicted(args).seconds, rel=1e-9)


@pytest.mark.parametrize("strategy", SHARDING)
def test_a_device_that_takes_no_time_waits_for_gradient_steps_and_result(strategy, monkeypatch):
    args = f"cluster=h100 strategy={strategy}"
    numel = owned(args)
    assert len(numel) == 5  # the root and four blocks
    # AdamW reads and writes 8 * 4 bytes, and the cast writes 2. Copies read 2 bytes and write 4.
    host = Host(down=4e9, steps=40e9, up=2e12)  # an element takes 1 ns, 1 ns, and 1 ps
    on_host(monkeypatch, host, Free(), Instant())
    prediction = predicted(f"{args} strategy.offload=states")
    done = [0.0]  # a gradient arrives while the step of the previous unit runs
    arrived: list[float] = []
    for number, count in enumerate(numel):
        begin = max(arrived[-1] if arrived else 0.0, done[max(0, number - 1)])
        arrived.append(begin + count * 1e-9)
        done.append(max(done[-1], arrived[-1]) + count * 1e-9)
    assert prediction.seconds == pytest.approx(done[-1] + numel[-1] * 1e-12, rel=1e-6)
    assert prediction.simulated.seconds_by_phase["optimizer"] == pytest.approx(prediction.seconds)
    # Gradients that are offloaded during backward have arrived: 36 bytes per element are left.
    host = Host(steps=36e9)
    on_host(monkeypatch, host, Free(), Instant())
    prediction = predicted(f"{args} strategy.offload=states,gradients")
    assert prediction.seconds == pytest.approx(sum(numel) * 1e-9, rel=1e-6)


def test_units_come_from_the_host_one_after_another_behind_the_computation(monkeypatch):
    args = "cluster=h100 model.lora.rank=2 strategy.offload=params prefetch=both"
    on_host(monkeypatch, Host(), Even(), Instant())
    free = predicted(args)
    assert free.seconds == pytest.approx(predicted(args.replace("true", "false")).seconds)
    on_host(monkeypatch, Host(up=1e6), Free(), Instant())
    prediction = predicted(args)
    copies = spans(prediction.simulated, UP)
    # The root and four blocks; two blocks again, which no unshard buffer has when backward begins.
    assert [each.label.split()[-1] for each in copies[:2]] == ["root", "model.layers.0"]
    assert len(copies) == 7
    assert prediction.seconds == pytest.approx(prediction.simulated.sent_bytes[UP] / 1e6, rel=1e-6)
    on_host(monkeypatch, Host(up=1e12), Even(), Instant())
    assert predicted(args).seconds == pytest.approx(free.seconds, rel=1e-3)


def test_two_buffers_limit_how_far_the_steps_are_ahead_of_the_copies(monkeypatch):
    args = "cluster=h100 strategy=full_shard"
    numel = owned(args)
    on_host(monkeypatch, Host(steps=36e9, up=2e6), Free(), Instant())
    prediction = predicted(f"{args} strategy.offload=states,gradients")
    ups = [each.end for each in spans(prediction.simulated, UP)]
    starts = [each.start for each in spans(prediction.simulated, STEPS)]
    assert starts[2:] == pytest.approx(ups[:-2])
    assert prediction.seconds == pytest.approx(sum(numel) * 1e-6, rel=1e-3)


def forwards_of(result: StepPrediction) -> list[TimelineSpan]:
    computed = spans(result.simulated, COMPUTE)
    return [each for each in computed if each.label.startswith("forward")]


def test_a_unit_waits_for_its_own_result_only(monkeypatch):
    args = "cluster=h100 strategy=full_shard prefetch=none strategy.offload=states,gradients"
    on_host(monkeypatch, Host(steps=36e9), Even(per_operator=1e-7), Instant())
    prediction = predicted(args)
    results = [each.end for each in spans(prediction.simulated, UP)]
    forwards = forwards_of(prediction)
    ends = [0.0, *(each.end for each in spans(prediction.simulated, COMPUTE))]
    for result, forward in zip(results[1:], forwards, strict=True):
        before = max(end for end in ends if end <= forward.start + 1e-12)
        assert forward.start == pytest.approx(max(result, before), rel=1e-9)
    assert forwards[0].start < results[2]
    # The gather of the next unit waits before a unit computes.
    prediction = predicted(f"{args} prefetch=both")
    results = [each.end for each in spans(prediction.simulated, UP)]
    forwards = forwards_of(prediction)
    assert results[2] <= forwards[0].start < results[3]


@pytest.mark.parametrize("strategy", SYNCING)
def test_the_exchange_of_parameters_that_follows_the_host_is_exposed(strategy, monkeypatch):
    args = f"cluster=h100 strategy={strategy} launch.nnodes=2 train.global_batch_size=4"
    on_host(monkeypatch, Host(steps=36e9), Even(per_operator=1.0), Plain())
    prediction = predicted(f"{args} strategy.offload=states,gradients")
    computing = spans(prediction.simulated, COMPUTE)
    syncs = [each for each in spans(prediction.simulated) if each.label.startswith("sync")]
    assert len(syncs) == 5
    for each in syncs:
        assert not any(other.start < each.end and each.start < other.end for other in computing)
    assert predicted(args).exposed_communication < prediction.exposed_communication


@pytest.mark.parametrize("offload", ["states", "states,gradients"])
def test_the_host_bounds_a_step_and_more_bandwidth_is_never_slower(offload):
    args = f"cluster=h100 strategy=full_shard strategy.offload={offload}"
    total = sum(owned(args)) * (40 if offload == "states" else 36) * 2  # of both ranks
    for key in ("host_bandwidth", "pcie_bandwidth"):
        rates = (0.001, 0.01, 0.1, 10)
        times = [predicted(f"{args} cluster.{key}={rate}").seconds for rate in rates]
        assert all(fast <= slow * (1 + 1e-9) for slow, fast in pairwise(times))
        assert times[0] > 1.2 * times[-1]
        if key == "host_bandwidth":
            assert times[0] >= total / 0.001e9


def test_copies_take_the_slower_of_link_and_memory():
    host = HostDataSheet(memory_bandwidth=100e9, pcie_bandwidth=10e9, ranks=4)
    assert host.transfer(DOWN, 8e9).seconds == pytest.approx(1.0)  # 0.8 of the link
    assert host.transfer(STEPS, 20e9).seconds == pytest.approx(1.0)  # 0.8 of a quarter
    assert replace(host, ranks=16).transfer(UP, 8e9).seconds == pytest.approx(1.6)


@contextmanager
def copied_bytes() -> Iterator[list[int]]:
    """List the bytes of each copy between host and device in the block."""
    results: list[int] = []
    copy = Copier._copy

    def counted(self: Copier, target: Tensor, source: Tensor, *args: Any) -> Any:
        results.append(target.nbytes)
        return copy(self, target, source, *args)

    with mock.patch.object(Copier, "_copy", counted):
        yield results


THREE = "accumulation.steps=3 train.global_batch_size=6"
CASES = (
    "strategy=full_shard precision=bf16 strategy.offload=states accumulation.steps=1",
    "strategy=shard_grad_op precision=fp32 strategy.offload=states,gradients accumulation.steps=1",
    f"strategy=shard_optimizer precision=bf16 strategy.offload=states,gradients {THREE}",
    f"precision=bf16 strategy.offload=states,gradients {THREE} accumulation=every",
    "precision=bf16 strategy.offload=states,params accumulation.steps=1",
    f"strategy=shard_grad_op precision=fp32 strategy.offload=all {THREE} prefetch=none",
    "precision=bf16 model.lora.rank=2 model.base_dtype=nf4 activation_checkpointing=full "
    "strategy.offload=params",
    f"precision=bf16 precision.master_dtype={SPLIT} strategy.offload=states accumulation.steps=1",
    f"precision=bf16 precision.reduce_dtype=bfloat16 precision.master_dtype={SPLIT} "
    f"optimizer.state_dtype=int8 strategy.offload=all {THREE}",
)


@pytest.mark.slow
@distributed(2)
@in_turn(args=CASES)
def test_the_engine_copies_the_bytes_that_are_priced(rank: int, world_size: int, args: str):
    args = f"cluster=h100 launch.device=cpu {args}"
    config = planned(args).config
    model = make_model(config, torch.device("cpu"), trains=True)
    optimizer = make_optimizer(config, model)

    def step() -> None:
        train_step(config, model, optimizer)
        if model.host is not None:
            model.host.synchronize()

    step()
    with copied_bytes() as copied:
        step()
    sent = predicted(args).simulated.sent_bytes
    scalars = HOST_SCALARS if model.host is not None else 0
    assert sum(copied) == sent.get(DOWN, 0) + sent[UP] + scalars
