"""States in host memory: bits and order of the step, and failures."""

import gc
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.api import load_checkpoint, save_checkpoint
from fsdpctl.comm.mesh import collectives_for
from fsdpctl.engine.blocks import checkpoint_block
from fsdpctl.engine.build import Sharding, _Builder
from fsdpctl.engine.offload import HostStates
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import GradAccumulator
from fsdpctl.engine.unit import bytes_outside_unshard_buffers
from fsdpctl.errors import EngineError, UsageError
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.muon import ShardedMuon
from fsdpctl.optim.record import clip_grad_norm_, record_step
from fsdpctl.optim.sgd import ShardedSGD
from fsdpctl.plan.owner_map import OWNER_MAPS
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.schedule import EventKind
from fsdpctl.plan.strategy import STRATEGIES
from tests.distributed import distributed, in_turn
from tests.engine.events import recording
from tests.engine.models import make_net, next_token_loss
from tests.engine.odd import freeze_all_but_vectors, in_four_bits
from tests.matrix import WHOLE, cases, fast

STEPS = 4
BF, F32 = torch.bfloat16, torch.float32
GRADIENTS = "states,gradients"
HYBRIDS = [name for name, row in STRATEGIES.items() if row.replicates]
OWNED = ["shard_optimizer", *(f"shard_optimizer {each}" for each in OWNER_MAPS[1:])]
make_net_tied = partial(make_net, tied=True)
BF16 = Precision(torch.bfloat16)
SPLIT = Precision(BF, torch.float32, BF, has_remainders=True)
# Precisions, whether the first micro-batch's gradients are held, and a step that is skipped.
VARIED = [(Precision(), True, 2), (BF16, False, None), (Precision(BF, BF, BF), False, 1)]


def _tokens(rank: int, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randint(17, (2, 9), generator=generator)


def _trained(  # noqa: PLR0913  # the options of a case
    rank: int, offload: str, *, strategy: str = "full_shard", precision: Precision = Precision(),
    size: int | None = None, holds: bool = False, skipped: int | None = None,
    state_dtype: torch.dtype | None = None,
    module: Callable[[], nn.Module] = lambda: make_net(tied=True),
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """Return losses, weights and states after a few steps of two micro-batches with clipping."""
    name, _, owners = strategy.partition(" ")
    sharding = Sharding(
        name, dp_shard_size=size, owner_map=owners or "even", precision=precision, offload=offload
    )
    model = shard_model(module(), sharding)
    model.overlap_param_gather = True
    optimizer = ShardedAdamW(model, lr=0.05, state_dtype=state_dtype)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=STEPS)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for part in range(2):
            with model.no_sync() if holds and part == 0 else nullcontext():
                loss = next_token_loss(model, _tokens(rank, step, part))
                (loss / 2).backward()
            total += loss.detach()
        model.sync_gradients()
        record = record_step(
            model, loss_sum=total if step != skipped else total * torch.nan, tokens=torch.tensor(2),
            nominal_tokens=2 * model.collectives.size, max_grad_norm=0.5,
        )  # fmt: skip
        optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(total))
    states = {
        f"{index} {name}": values.clone()
        for index, (_, state) in enumerate(optimizer.span_states())
        for name, values in state.items()
    }
    return losses, model.state_dict(), states


def _check_alike(rank: int, mode: str, **case: Any) -> None:
    expected, results = (_trained(rank, offload, **case) for offload in ("none", mode))
    assert expected[0] == results[0]
    for before, after in zip(expected[1:], results[1:], strict=True):
        assert before.keys() == after.keys()
        for name, values in before.items():
            assert torch.equal(values, after[name]), name


def _recomputed() -> nn.Module:
    net = make_net(tied=False)
    for block in net.blocks:
        checkpoint_block(block, "full")
    return net


def _in_part() -> nn.Module:
    net = make_net(tied=False)
    freeze_all_but_vectors(net)
    return net


def _with_unused() -> nn.Module:
    net = make_net(tied=True)
    net.blocks[1].unused = nn.Linear(7, 13)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@distributed(timeout=600)
@in_turn(
    mode__precision__holds__skipped=[
        *((mode, *each) for mode in ("states", GRADIENTS) for each in VARIED),
        ("states,params", *VARIED[0]), *(("all", *each) for each in VARIED[1:]),
    ],
    module=[make_net_tied, _recomputed, _in_part, _with_unused],
    strategy=["full_shard", "shard_grad_op", *OWNED, *HYBRIDS],
)  # fmt: skip
def test_same_bits_of_every_kind(rank, world_size, strategy, mode, **case):
    in_parts = strategy in STRATEGIES and STRATEGIES[strategy].can_offload_params
    if mode in ("states,params", "all") and not in_parts:
        return
    if strategy in HYBRIDS:
        if world_size != 4:
            return
        case["size"] = 2
    _check_alike(rank, mode, strategy=strategy, **case)


@distributed(world_size=2)
def test_a_window_and_its_clipped_gradients_have_their_norms_on_the_host_too(rank, world_size):
    norms = []
    for offload in ("none", GRADIENTS):
        model = shard_model(make_net(tied=True), Sharding("full_shard", offload=offload))
        optimizer = ShardedAdamW(model, lr=0.05)
        accumulator = GradAccumulator(model, steps=2)
        for part in range(2):
            with accumulator.micro_step():
                next_token_loss(model, _tokens(rank, 0, part)).backward()
        norms.append([float(clip_grad_norm_(model, 0.5)) for _ in range(2)])
        optimizer.step()
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert norms[1][1] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3]))
@distributed()
def test_same_bits_of_parameters_that_rest_on_the_host(rank, world_size, whole):
    modes = [
        ("params", _in_part), ("params", in_four_bits), ("all", in_four_bits),
        ("states,params", _recomputed),
    ]  # fmt: skip
    for (mode, module), strategy, precision in cases(
        modes, ["full_shard", "shard_grad_op"], [Precision(), BF16], whole=whole
    ):
        options: dict[str, Any] = {"module": module, "strategy": strategy, "precision": precision}
        _check_alike(rank, mode, holds=True, **options)


@distributed(2)
def test_no_parameters_stay_on_the_device(rank: int, world_size: int) -> None:
    model = shard_model(make_net(tied=True), Sharding(offload="all"))
    assert bytes_outside_unshard_buffers(list(model._runtime.units.values())) == 0
    assert model.host_memory_bytes() > model.shard_memory_bytes()
    with torch.no_grad():
        next_token_loss(model, _tokens(rank, 0))
    assert model.accounting.peak_nbytes < model.replicated_memory_bytes()


def test_the_memory_of_initial_values_is_freed() -> None:
    """The builder of units allocates memory as large as the largest flat buffer."""
    model = shard_model(make_net(tied=True), Sharding(offload="states,params"))
    assert model.host is not None
    gc.collect()
    assert not any(type(each) is _Builder for each in gc.get_objects())


@pytest.mark.parametrize(("sharding", "message"), [
    (Sharding("shard_optimizer", offload="params"), "not supported with strategy=shard_opt"),
    (Sharding(offload="params"), "expected states,params or all"),
])  # fmt: skip
def test_parameters_that_cannot_rest_on_the_host_are_rejected(sharding, message):
    with pytest.raises(UsageError, match=message):
        shard_model(make_net(tied=True), sharding)


@distributed(2)
@in_turn(mode=["states", GRADIENTS], precision=[Precision(), BF16])
def test_units_wait_for_their_own_step_only(rank, world_size, mode, precision):
    seen: list[tuple[str, str]] = []
    # `optimizer.step` has returned; the second unit has begun its forward.
    returned, used = threading.Event(), threading.Event()
    right = HostStates._step
    model = shard_model(make_net(tied=True), Sharding(precision=precision, offload=mode))
    *_, last = model._runtime.units

    def gated(self: HostStates, step: Any, *args: Any) -> Any:
        unit = step.buffer.shard.unit
        assert returned.wait(20)
        assert unit != last or used.wait(20)
        ready = right(self, step, *args)
        seen.append(("stepped", unit))
        return ready

    def happened() -> None:
        seen.append((trace[-1].kind, trace[-1].unit))
        if seen.count((EventKind.FORWARD, model._runtime.schedule.order.forward[1])):
            used.set()

    optimizer = ShardedAdamW(model, lr=0.05)
    next_token_loss(model, _tokens(rank, 0)).backward()
    with mock.patch.object(HostStates, "_step", gated):
        optimizer.step()
        returned.set()
        optimizer.zero_grad()
        with recording(model) as trace, mock.patch.object(model.accounting, "on_event", happened):
            next_token_loss(model, _tokens(rank, 1))
    for unit in model._runtime.units:
        assert seen.index(("stepped", unit)) < seen.index((EventKind.GATHER, unit)), unit


@distributed(2)
def test_the_next_forward_raises_an_error_of_the_host_and_no_half_step_is_saved(rank, world_size):
    model = shard_model(make_net(tied=True), Sharding(offload="states"))
    optimizer = ShardedAdamW(model, lr=0.05)
    next_token_loss(model, _tokens(rank, 0)).backward()
    calls = []

    def fails(*args: Any, **more: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("planted")

    with mock.patch("fsdpctl.optim.adamw._adamw", fails):
        optimizer.step()
        with pytest.raises(EngineError, match="planted"):
            next_token_loss(model, _tokens(rank, 1))
    for read in (model.state_dict, optimizer.state_dict, lambda: list(optimizer.span_states())):
        with pytest.raises(EngineError, match="planted"):
            read()


@distributed(2)
@in_turn(before__after=[("states", "none"), ("none", GRADIENTS), (GRADIENTS, "states")])
def test_a_running_step_is_saved_in_full_and_resumed_elsewhere(rank, world_size, before, after):
    (folder,) = collectives_for(torch.device("cpu")).all_gather_values(tempfile.mkdtemp())[:1]
    right = HostStates._step

    def slow(self: HostStates, *args: Any) -> Any:
        time.sleep(0.01)
        return right(self, *args)

    def run(offload: str, steps: range, load: bool) -> list[float]:
        model = shard_model(make_net(tied=True), Sharding(offload=offload))
        optimizer = ShardedAdamW(model, lr=0.05)
        if load:
            load_checkpoint(f"{folder}/{before}", model, optimizer)
        losses = []
        for step in steps:
            loss = next_token_loss(model, _tokens(rank, step))
            loss.backward()
            optimizer.step()
            if not load and step == 1:
                save_checkpoint(f"{folder}/{before}", model, optimizer)
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    with mock.patch.object(HostStates, "_step", slow):
        whole = run(before, range(4), load=False)
    assert run(after, range(2, 4), load=True) == whole[2:]


class _Wide(nn.Module):
    """A net with matrices whose moments are compressed, and four experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make_net(tied=True)
        self.blocks = nn.ModuleList(nn.Linear(65, 65) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(4, 65, 17) / 8)
        self.spread = nn.Linear(17, 65)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.spread(self.net(tokens))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return torch.einsum("bsi,eio,bse->bso", hidden, self.experts, hidden[..., :4].softmax(-1))


CODED = {"state_dtype": torch.int8, "module": _Wide}
NARROW = Precision(BF, BF, BF, has_remainders=True)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3]))
@distributed()
@in_turn(mode__strategy__case=[
    ("states", "full_shard", {"precision": SPLIT, "skipped": 1}),
    ("all", "full_shard", {"precision": NARROW, "holds": True}),
    (GRADIENTS, "shard_optimizer", {"precision": SPLIT, **CODED}),
    ("states,params", "shard_grad_op", {"precision": BF16, **CODED, "skipped": 1}),
    ("all", "full_shard", {**CODED, "precision": NARROW}),
    ("states", "shard_optimizer contiguous", CODED),
    ("states", "full_shard", {"precision": SPLIT, "module": in_four_bits}),
    ("states", "full_shard", {"state_dtype": F32, "precision": Precision(BF, BF, BF)}),
    *(("params", "hybrid_shard", {"size": size, "module": _in_part}) for size in (1, 2)),
])  # fmt: skip
def test_same_bits_of_compressed_states_and_of_replicas(rank, world_size, mode, strategy, case):
    if "size" in case and world_size != 2:
        return
    _check_alike(rank, mode, strategy=strategy, **case)


@pytest.mark.parametrize("sharding", [Sharding(offload="states"), Sharding(offload="all")])
@pytest.mark.parametrize("precision", [Precision(), BF16])
def test_what_the_host_cannot_step_is_rejected(sharding, precision):
    model = shard_model(make_net(tied=True), replace(sharding, precision=precision))
    for make in (ShardedMuon, ShardedSGD):
        with pytest.raises(UsageError, match=f"^{make.__name__}: not supported with offload"):
            make(model, lr=0.1)
    with pytest.raises(EngineError, match="flat_parameters: not supported"):
        model.flat_parameters()
