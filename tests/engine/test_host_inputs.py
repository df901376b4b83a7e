"""Inputs of recomputed blocks in host memory: the same bits, less memory, and no leak."""

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Resolved
from fsdpctl.engine.host_worker import Copier
from fsdpctl.engine.offloaded_inputs import HostInputs, InputBuffers
from fsdpctl.errors import EngineError
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import enable_context_parallel, make_model, make_optimizer
from tests.distributed import distributed, in_turn
from tests.engine.odd import KINDS, InPlace, Kind, Stack, checkpoint_all, square_loss
from tests.predict.random_configs import random_config
from tests.predict.tensor_bytes import host_inputs
from tests.train_step import train_step

pytest.importorskip("torch._dynamo")  # before the tests: the import keeps references to the stack
MODES = ["full", "selective"]
# Kinds with blocks that are recomputed already, or write to their inputs.
LEFT_OUT = {"in four bits", "mixed", "recomputed", "recomputed selectively"}


class Dropping(nn.Module):
    """A block with dropout and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, scale: float, *, x: Tensor) -> Tensor:
        return x.add(self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.3)), alpha=scale)


class Chain(nn.Module):
    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Dropping() for _ in range(num_blocks))
        self.during: Callable[[int], None] = lambda number: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(0.5, x=x)
            self.during(number)
        return x.square().mean()


def chain(mode: str, *, offload: bool) -> tuple[Chain, HostInputs]:
    net = Chain()
    return net, checkpoint_all(net.blocks, mode, offload=offload)


def gradients(module: nn.Module) -> list[Tensor | None]:
    results = [each.grad for each in module.parameters()]
    module.zero_grad()
    return results


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def all_free(inputs: HostInputs) -> bool:
    return sum(each.numel() for each in inputs.buffers._free) == inputs.buffers.nbytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - LEFT_OUT))
def test_the_same_bits_whatever_blocks_do(kind: str, mode: str) -> None:
    options, results = KINDS[kind], []
    for offload in (False, True):
        module = options.make()
        blocks = module.get_submodule("blocks").children()
        inputs = checkpoint_all(blocks, mode, offload=offload)
        results += [list(_steps(options, module))]
        assert all_free(inputs)
        # In "frozen below", only the last block has a backward.
        assert bool(inputs.sizes) == (offload and kind != "frozen below")
    assert all(map(same, *results))


def _steps(kind: Kind, module: nn.Module) -> Iterator[list[Tensor | None]]:
    for of_ranks in kind.batches(2, 1, 1):
        torch.manual_seed(1)
        kind.loss(module, of_ranks[0][0]).backward()
        yield gradients(module)


@pytest.mark.parametrize("mode", MODES)
def test_several_micro_batches_in_flight_kept_graphs_and_dropout(mode: str) -> None:
    results = []
    for offload in (False, True):
        net, inputs = chain(mode, offload=offload)
        torch.manual_seed(1)
        one, two = net(torch.randn(3, 16)), net(torch.randn(5, 16))
        one.backward(retain_graph=mode == "full")  # torch saves selected tensors for one backward
        if mode == "full":
            one.backward()
        two.backward()
        del one, two
        results.append(gradients(net))
        assert all_free(inputs)
    assert inputs.buffers.nbytes == 4 * 16 * 4 * (3 + 5)
    assert same(*results)


@contextmanager
def seen(net: Chain) -> Iterator[list[str]]:
    """Record when blocks run and copies start: "down" to the host, "up" to the device."""
    events: list[str] = []
    right, forward = Copier._copy, Dropping.forward

    def copies(self: Copier, target: Tensor, source: Tensor, *args: Any) -> Any:
        is_down = any(target.data_ptr() == each.data_ptr() for each in on_host)
        events.append("down" if is_down else "up")
        return right(self, target, source, *args)

    def runs(self: Dropping, *arguments: Any, **more: Any) -> Tensor:
        events.append(f"block {list(net.blocks).index(self)}")
        return forward(self, *arguments, **more)

    on_host: list[Tensor] = []
    take = InputBuffers.take

    def takes(self: InputBuffers, *inputs: Any) -> Tensor:
        buffer = take(self, *inputs)
        on_host.append(buffer)
        return buffer

    with (
        mock.patch.object(Copier, "_copy", copies),
        mock.patch.object(InputBuffers, "take", takes),
        mock.patch.object(Dropping, "forward", runs),
    ):
        yield events


def test_inputs_leave_beside_their_block_and_return_one_block_ahead() -> None:
    net = Chain(num_blocks=4)
    with seen(net) as events:
        checkpoint_all(net.blocks, "full", offload=True)
        loss = net(torch.randn(3, 16))
        assert events == ["down", "block 0", "down", "block 1", "down", "block 2", "block 3"]
        events.clear()
        loss.backward()
        assert events == ["up", "block 3", "up", "block 2", "up", "block 1", "block 0"]
        with torch.no_grad():
            net(torch.randn(3, 16))
        assert "down" not in events


@pytest.mark.parametrize("mode", MODES)
def test_only_the_last_input_stays_on_the_device(mode: str) -> None:
    net = Chain()
    alive: list[weakref.ref[Tensor]] = []
    right = HostInputs.offload

    def watched(self: HostInputs, number: int, args: Tensor) -> Any:
        alive.append(weakref.ref(args))
        return right(self, number, args)

    with mock.patch.object(HostInputs, "offload", watched):
        checkpoint_all(net.blocks, mode, offload=True)
        loss = net(torch.randn(3, 16))
    assert [each() is not None for each in alive] == [False, False, False, False, True]
    loss.backward()
    assert not any(each() is not None for each in alive)


@pytest.mark.parametrize("fails", [1, 4])
@pytest.mark.parametrize("again", [False, True])
def test_a_failed_pass_leaks_nothing_and_the_next_one_is_right(fails: int, again: bool) -> None:
    """A block raises in its forward, or when it is recomputed."""
    (expected, _), net, batch = chain("full", offload=False), Chain(), torch.randn(3, 16)
    right, calls = Dropping.forward, []

    def failing(self: Dropping, *args: Any, **more: Any) -> Tensor:
        calls.append(list(net.blocks).index(self))
        if calls.count(fails) == 1 + again and calls[-1] == fails:
            raise ValueError("planted")
        return right(self, *args, **more)

    with mock.patch.object(Dropping, "forward", failing):
        inputs = checkpoint_all(net.blocks, "full", offload=True)
        with pytest.raises(ValueError, match="planted"):
            net(batch).backward()
    net.zero_grad()
    assert all_free(inputs)
    for each in (net, expected):
        torch.manual_seed(1)
        each(batch).backward()
    assert same(gradients(net), gradients(expected))
    assert inputs.buffers.nbytes == 4 * batch.nbytes


def test_a_block_that_writes_to_its_input_is_rejected() -> None:
    net = Stack(InPlace)
    checkpoint_all(net.blocks, "full", offload=True)
    with pytest.raises(EngineError, match="offload=true: not supported, because a block writes"):
        square_loss(net, torch.randn(4, 13) * torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("count", [1, 5, 31, 80])
@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 18, 7 * 1000])
def test_host_memory_is_allocated_in_few_pieces_that_torch_rounds_little(count, nbytes):
    pieces: list[int] = []

    def allocate(size: int) -> Tensor:
        pieces.append(size)
        return torch.empty(size, device="meta")

    buffers = InputBuffers(count, allocate)
    taken = [buffers.take(number, nbytes) for number in range(count)]
    assert sum(pieces) == buffers.nbytes == count * nbytes
    assert len(pieces) <= 6
    if count > 5:
        assert sum(1 << (size - 1).bit_length() for size in pieces) <= 1.1 * sum(pieces)
    for each in taken:
        buffers.free(each)
    assert buffers.take(0, nbytes // 2) is taken[0]


SMALL = [
    "launch.device=cpu", "model.num_layers=4", "model.hidden_size=32", "model.vocab_size=64",
    "model.intermediate_size=64", "model.num_heads=2", "model.num_kv_heads=1", "train.seq_len=33",
    "train.micro_batch_size=2", "accumulation.steps=2",
]  # fmt: skip
CASES = [
    ["activation_checkpointing=full", "data=chat", "accumulation=last"],
    ["activation_checkpointing=selective", "strategy=shard_grad_op", "precision=bf16"],
    ["activation_checkpointing=full", "model.lora.rank=2", "model.lora.dropout=0.3",
     "model.base_dtype=nf4"],
]  # fmt: skip


def trained(config: Resolved, rank: int, *, offload: bool) -> dict[str, Tensor]:
    options = replace(config.activation_checkpointing, offload=offload)
    config = replace(config, activation_checkpointing=options)
    torch.manual_seed(rank)
    cpu = torch.device("cpu")
    model = make_model(config, cpu, trains=True)
    enable_context_parallel(cpu, model.collectives.size, config.train.context_parallel)
    optimizer = make_optimizer(config, model)
    for _ in range(2):
        train_step(config, model, optimizer)
    inputs = host_inputs(model)
    assert config.activation_checkpointing.offloads_inputs == bool(inputs and inputs.sizes)
    state: dict[str, Tensor] = model.state_dict()
    return state


def check_bits(config: Resolved, rank: int) -> None:
    one, other = (trained(config, rank, offload=offload) for offload in (False, True))
    assert all(torch.equal(values, other[name]) for name, values in one.items())


def composed(ranks: int, args: list[str]) -> Resolved:
    args = [f"launch.nproc_per_node={ranks}", f"train.global_batch_size={4 * ranks}", *SMALL, *args]
    return stored_config(assign_ranks(compose_config(args).config))


@pytest.mark.parametrize("args", CASES, ids=["packed", "selective", "adapters"])
def test_a_run_has_the_same_bits(args: list[str]) -> None:
    """Train with accumulation, packed documents, bf16, and adapters with dropout over NF4."""
    check_bits(composed(1, args), 0)


TREATMENTS = ["full:2", "offload:1,full:1,selective:1", "offload:3", "selective:3"]


def check_treatments(config: Resolved, rank: int) -> None:
    usual = trained(config, rank, offload=False)
    for blocks in TREATMENTS:
        mixed = config.changed({"activation_checkpointing.blocks": blocks})
        other = trained(mixed, rank, offload=False)
        assert all(torch.equal(values, other[name]) for name, values in usual.items()), blocks


@pytest.mark.parametrize("args", [
    ["data=chat", "accumulation=last"],
    ["model.overrides.model_type=qwen3_moe", "model.overrides.num_experts=4",
     "model.overrides.num_experts_per_tok=2", "precision=bf16"],
], ids=["packed", "experts"])  # fmt: skip
def test_blocks_of_every_treatment_have_the_same_bits(args: list[str]) -> None:
    check_treatments(composed(1, args), 0)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@distributed(timeout=120)
@in_turn(args=CASES)
def test_ranks_have_the_same_bits(rank: int, world_size: int, args: list[str]) -> None:
    check_bits(composed(world_size, args), rank)
    check_treatments(composed(world_size, [x for x in args if "checkpointing" not in x]), rank)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@distributed(timeout=600)
def test_runs_of_every_kind_have_the_same_bits(rank: int, world_size: int) -> None:
    result = 0
    for seed in count():
        config = random_config(random.Random(f"inputs {seed} {world_size}"), world_size)
        layers, offloads = config.model.num_layers, config.activation_checkpointing.offload
        if offloads and layers > 2 and not config.model.trainable:
            result += 1
            check_bits(config, rank)
        if result == 12:
            return


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mamba2", "mixtral"])
def test_decoders_of_transformers_have_the_same_bits(family, mode, tmp_path):
    decoders = pytest.importorskip("tests.models.decoders")
    decoders.save_decoder(family, tmp_path)
    mixed = ["model.init=random", "launch.nproc_per_node=1", "train.global_batch_size=4"]
    settings = [*SMALL[-3:], *mixed, "launch.device=cpu", f"activation_checkpointing={mode}"]
    check_bits(stored_config(assign_ranks(decoders.compose(tmp_path, *settings))), 0)
