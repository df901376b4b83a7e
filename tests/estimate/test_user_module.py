"""`fsdpctl.estimate_memory` matches real runs of any module."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fsdpctl
from fsdpctl.errors import UsageError
from fsdpctl.estimate.user_module import estimate_memory
from tests.distributed import distributed
from tests.engine.models import OddNet, one_step
from tests.predict.tensor_bytes import watched_step

ON_CPU = fsdpctl.Assumed(device="cpu")


@distributed(world_size=2)
def test_a_module_that_is_not_a_decoder(rank: int, world_size: int) -> None:
    model = fsdpctl.shard_model(OddNet(tied=True, num_blocks=9), "full_shard")
    optimizer = fsdpctl.ShardedAdamW(model)
    batch = torch.randint(0, 17, (20, 31))
    peak, _ = watched_step(model, partial(one_step, model, optimizer, batch))
    estimate = estimate_memory(
        lambda: OddNet(tied=True, num_blocks=9),
        lambda: torch.empty(batch.shape[0], batch.shape[1] - 1, dtype=torch.int64),
        world_size=world_size,
        loss_fn=lambda logits: nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.empty(logits.shape[:2], dtype=torch.int64).flatten()
        ),
        assumed=ON_CPU,
    )
    assert estimate.peak_allocated == pytest.approx(peak, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@distributed(world_size=2)
def test_an_unmodified_decoder_of_transformers(rank: int, world_size: int, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 500}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": 500}
    config = AutoConfig.for_model(family, **sizes)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0

    def make() -> nn.Module:
        module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return module

    def inputs() -> dict[str, object]:
        tokens = torch.zeros(2, 96, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    model = fsdpctl.shard_model(make(), "full_shard")
    optimizer = fsdpctl.ShardedAdamW(model)

    def step() -> None:
        loss: Tensor = model(**inputs()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    peak, _ = watched_step(model, step)
    estimate = estimate_memory(make, inputs, world_size=world_size, assumed=ON_CPU)
    assert estimate.peak_allocated == pytest.approx(peak, rel=0.01)


def estimate_sum(
    module_fn: Callable[[], nn.Module], *shape: int, sharding: str = "full_shard"
) -> fsdpctl.MemoryEstimate:
    """Estimate the memory of two CPU ranks, whose loss is the sum of the outputs."""
    return estimate_memory(
        module_fn, lambda: torch.ones(shape), world_size=2, loss_fn=torch.sum, sharding=sharding,
        assumed=ON_CPU,
    )  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


def estimated(**options: object) -> fsdpctl.MemoryEstimate:
    options = {"world_size": 4, "loss_fn": torch.sum, **options}
    return estimate_memory(net, lambda: torch.empty(32, 64), **options)  # type: ignore[arg-type]  # of any type


def test_states_in_host_memory_are_not_on_the_device():
    plain, offloaded = estimated(), estimated(sharding=fsdpctl.Sharding(offload="states"))
    assert offloaded.breakdown["optimizer_states"] < 512  # counters
    moved = plain.breakdown["optimizer_states"] + plain.breakdown["parameters"]
    assert offloaded.host_states > moved > plain.host_states == 0


def test_a_verdict_accepts_any_size():
    estimate = estimated()
    assert (estimate.verdict("80GiB"), estimate.verdict(1000)) == ("fits", "too_large")
    assert estimate.breakdown["rounding"] < 512 * 100
    assert estimate.peak_allocated <= estimate.peak_reserved


def test_other_engines_hold_their_shards_and_no_states_of_frozen_parameters():
    for engine, sharding, share in (("fsdp2", "full_shard", 4), ("ddp", "no_shard", 1)):
        numel = (64 * 256 + 256 + 256 * 8 + 8) // share
        assumed = fsdpctl.Assumed(engine=engine)
        estimate = estimated(sharding=sharding, assumed=assumed).breakdown
        assert estimate["parameters"] == pytest.approx(4 * numel, abs=4 * 512)
        assert estimate["optimizer_states"] == pytest.approx(8 * numel, abs=12 * 512)

        def frozen() -> nn.Module:
            module = net()
            module[0].requires_grad_(False)  # type: ignore[index]  # a Sequential
            return module

        part = estimate_memory(
            frozen, lambda: torch.empty(32, 64), world_size=4, loss_fn=torch.sum, sharding=sharding,
            assumed=assumed,
        )  # fmt: skip
        states = 8 * (256 * 8 + 8) // share
        assert part.breakdown["optimizer_states"] == pytest.approx(states, abs=6 * 512)


def test_fully_shard_gathers_nothing_for_one_rank():
    for ranks, gathers in ((1, False), (2, True)):
        estimate = estimated(world_size=ranks, assumed=fsdpctl.Assumed(engine="fsdp2"))
        items = [
            estimate.step.recorder.purpose(key).description
            for key, nbytes in estimate.step.trace.operations(2)
            if nbytes > 0
        ]
        assert ("gathered parameters" in items) == gathers


def test_fully_shard_with_replicas_keeps_all_reduced_gradients():
    most_live = []
    for ranks, strategy, size in ((4, "full_shard", None), (8, "hybrid_shard", 4)):
        estimate = estimated(
            world_size=ranks, assumed=fsdpctl.Assumed(engine="fsdp2", num_micro_batches=2),
            sharding=fsdpctl.Sharding(strategy, dp_shard_size=size),
        )  # fmt: skip
        live, most = set[int](), 0
        for key, nbytes in estimate.step.trace.operations(2):
            if key >= 0 and estimate.step.recorder.purpose(key).category == "gradients":
                live = live | {key} if nbytes else live - {key}
            most = max(most, len(live))
        most_live.append(most)
    assert most_live[1] > most_live[0]


class PartlyUsed(nn.Module):
    """A module with a layer that no output needs."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.used(x)
        return out


@distributed(world_size=2)
def test_unused_parameters_have_no_states(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(PartlyUsed() for _ in range(4)))

    model = fsdpctl.shard_model(make(), "no_shard")
    optimizer = fsdpctl.ShardedAdamW(model)
    step = partial(one_step, model, optimizer, torch.ones(3, 64), lambda module, x: module(x).sum())
    peak, _ = watched_step(model, step)
    result = estimate_sum(make, 3, 64, sharding="no_shard")
    assert result.peak_allocated == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("options", "part"), [
    ({"sharding": "full_shart"}, "did you mean full_shard?"),
    ({"assumed": fsdpctl.Assumed(device="gpu")}, "expected cuda, cpu"),
    ({"assumed": fsdpctl.Assumed(engine="fsdp")}, "did you mean fsdp2?"),
    ({"loss_fn": None}, "pass loss_fn="), ({"world_size": 0}, "world_size=0"),
    ({"assumed": fsdpctl.Assumed(num_micro_batches=0)}, "num_micro_batches=0"),
    ({"loss_fn": lambda y: y[y > 0].sum()}, "cannot run on the meta device"),
    ({"loss_fn": lambda y: y.sum().detach()}, "cannot run on the meta device"),
    ({"loss_fn": lambda y: y.sum() * y.sum().item()}, "reads the value"),
    ({"sharding": fsdpctl.Sharding("hybrid_shard", dp_shard_size=3)}, "must divide"),
    ({"sharding": fsdpctl.Sharding(owner_map="matrices")}, "only valid with shard_optimizer"),
    ({"sharding": fsdpctl.Sharding(offload="params")}, "params: "),
    ({"sharding": fsdpctl.Sharding("no_shard", offload="states")}, "not supported with strategy"),
    ({"sharding": fsdpctl.Sharding(offload="states"), "assumed": fsdpctl.Assumed(engine="fsdp2")},
     "requires engine=fsdpctl"),
])  # fmt: skip
def test_errors_are_one_line(options, part):
    with pytest.raises(UsageError, match=".+") as error:
        estimated(**options)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_block_that_runs_twice_is_rejected_by_name():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return x

    with pytest.raises(UsageError, match=r"blocks\.0 runs more than once"):
        estimate_sum(Twice, 2, 64)


def test_values_that_a_module_reads_do_not_depend_on_memory_that_was_freed() -> None:
    """Traced tensors have no values: `any` is taken for false, `all` for true."""
    read = set[tuple[bool, bool]]()

    class _ReadsMasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mask = x > 0
            for _ in range(8):
                read.add((bool(mask.any()), bool(mask.all())))
            result: Tensor = self.linear(x)
            return result

    estimate_sum(_ReadsMasks, 4, 8)
    assert read == {(False, True)}
