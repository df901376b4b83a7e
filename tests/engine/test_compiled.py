"""Compiled blocks of a sharded model have as many graphs as without sharding, at every step."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdpctl
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.blocks import compile_block
from fsdpctl.models.lora import set_trainable
from fsdpctl.models.packed_documents import pack_documents
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.training.callbacks.reporting import CompilerReport
from tests.distributed import distributed
from tests.engine.odd import checkpoint_all
from tests.matrix import fast
from tests.models.decoders import drawn

# Blocks, and fewer graphs of one function: with adapters, a decoder has 4, two for the first block,
# whose input requires no gradient.
BLOCKS, LIMIT = 6, 5
TINY = [
    f"model.num_layers={BLOCKS}", "model.hidden_size=16", "model.intermediate_size=24",
    "model.num_heads=2", "model.num_kv_heads=2", "model.vocab_size=32",
]  # fmt: skip
LENGTHS = ((5, 11), (9, 7))
Wrap = Callable[[nn.Module], Any]


def decoder(mode: str, *, adapted: bool) -> TransformersDecoder:
    """Return a decoder with compiled blocks, `adapted` by LoRA or trained in full."""
    config = compose_config([*TINY, *(["model.lora.rank=2"] if adapted else [])]).config.model
    model = drawn(compose_config(TINY).config.model)
    if adapted:
        set_trainable(model, config)
        for name, param in model.named_parameters():
            if param.is_meta:
                *path, key = name.split(".")
                owner = model.get_submodule(".".join(path))
                setattr(owner, key, nn.Parameter(torch.full(param.shape, 0.01)))
    blocks = list(model.get_submodule("model.layers").children())
    if mode != "none":
        offload = mode == "offload"
        checkpoint_all(blocks, "full" if offload else mode, offload=offload)
    for block in blocks:
        compile_block(block)
    return model


class Block(nn.Module):
    """A small block, which Dynamo traces quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(self.norm(x)).tanh()


def small(mode: str) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if mode != "none":
        checkpoint_all(model, "full", offload=mode == "offload")
    for block in model:
        compile_block(block)
    return model


def run_small(model: Any, step: int) -> None:
    x = torch.ones(2, 8)
    model(x).sum().backward() if step < 3 else model(x)


def run_decoder(model: Any, step: int) -> None:
    """Train on full and on packed rows, then validate."""
    tokens = torch.arange(32).view(2, 16)
    documents = pack_documents(LENGTHS, torch.device("cpu"), kernel_device="cuda")
    loss = model(tokens, tokens, documents=documents if step == 2 else None)
    if step < 3:
        loss.backward()


def graphs(make: Callable[[], nn.Module], run: Callable[..., None], wrap: Wrap) -> list[Any]:
    """Return the numbers of graphs and calls, after each of three steps and a validation."""
    calls = 0

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph(*args)

        return called

    compile_with = torch.compile
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    results: list[Any] = []

    def compiled(forward: Any) -> Any:
        return compile_with(forward, backend=counting)

    with mock.patch.object(torch, "compile", compiled):
        model = wrap(make())
    for step in range(4):
        model.train(step < 3)
        limited = torch._dynamo.config.patch(recompile_limit=LIMIT)
        with limited, torch.set_grad_enabled(step < 3):
            run(model, step)
        results.append((counters["stats"]["unique_graphs"], calls))
    return results


def check(make: Callable[..., nn.Module], run: Callable[..., None], name: str, **how: Any) -> None:
    plain = graphs(make, run, lambda module: module)
    assert graphs(make, run, lambda module: fsdpctl.shard_model(module, name, **how)) == plain
    assert BLOCKS <= plain[0][1] < plain[1][1] < plain[2][1] < plain[3][1]


@pytest.mark.parametrize("mode", fast("none", slow=["full", "offload"]))
@distributed(world_size=2)
def test_sharded_blocks_stay_compiled(rank: int, world_size: int, mode: str) -> None:
    check(partial(small, mode), run_small, "full_shard")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective", "offload", "full, with adapters"])
@distributed(world_size=2)
def test_sharded_decoders_stay_compiled(rank: int, world_size: int, mode: str) -> None:
    recomputed, _, adapters = mode.partition(", ")
    check(partial(decoder, recomputed, adapted=bool(adapters)), run_decoder, "full_shard")


@pytest.mark.slow
@distributed(world_size=4)
def test_sharded_replicas_stay_compiled(rank: int, world_size: int) -> None:
    check(partial(small, "full"), run_small, "hybrid_shard", dp_shard_size=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns about its own code
def test_recomputed_decoders_are_compiled():
    """Attention masks that depend on data do not prevent compilation."""
    assert graphs(partial(decoder, "full", adapted=False), run_decoder, lambda module: module) == [
        (1, BLOCKS), (1, 2 * BLOCKS), (2, 3 * BLOCKS), (3, 4 * BLOCKS),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch warns about its own code
def test_the_first_function_that_is_no_longer_compiled_is_warned_of():
    journal, run = mock.Mock(), mock.Mock()
    report = CompilerReport(journal)
    torch._dynamo.reset()
    report.begin(run)
    with torch._dynamo.config.patch(recompile_limit=1):
        for add in (lambda x: x + 1, lambda x: x + 2):
            compiled = torch.compile(add, backend="eager")
            for size in range(1, 4):
                compiled(torch.ones([2] * size))
    report.end(run, None)
    ((message,), _) = journal.warn.call_args
    assert journal.warn.call_count == 1
    assert "torch._dynamo hit config.recompile_limit (1)" in message
    assert "rank mismatch" in message
    assert "TORCH_LOGS" not in message
    assert "\n" not in message
