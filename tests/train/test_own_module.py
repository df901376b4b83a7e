"""`fsdpctl.estimate_memory` says of any module what a real run holds."""

import pytest
import torch
from torch import Tensor, nn

import fsdpctl
from fsdpctl.errors import UsageError
from fsdpctl.train.own_module import estimate_memory
from tests.distributed import distributed
from tests.engine.models import OddNet, next_token_loss, token_batches
from tests.memory.watch import watched_step

ON_CPU = fsdpctl.Assumed(device="cpu")


@distributed(world_size=2)
def test_a_module_that_is_no_decoder(rank: int, world_size: int) -> None:
    net = OddNet(tied=True, num_blocks=9)
    model = fsdpctl.shard_model(net, "full_shard")
    optimizer = fsdpctl.ShardedAdamW(model)
    batch = token_batches(1, 2)[0][rank][0]

    def step() -> None:
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    peak, _ = watched_step(model, step)
    found = estimate_memory(
        lambda: OddNet(tied=True, num_blocks=9),
        lambda: torch.empty(batch.shape[0], batch.shape[1] - 1, dtype=torch.int64),
        world_size=world_size,
        loss_fn=lambda logits: nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.empty(logits.shape[:2], dtype=torch.int64).flatten()
        ),
        assumed=ON_CPU,
    )
    assert found.peak_allocated == pytest.approx(peak, rel=0.01)


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
        made: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return made

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
    found = estimate_memory(make, inputs, world_size=world_size, assumed=ON_CPU)
    assert found.peak_allocated == pytest.approx(peak, rel=0.01)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


def weigh(**about: object) -> fsdpctl.MemoryEstimate:
    given = {"world_size": 4, "loss_fn": torch.sum, **about}
    return estimate_memory(net, lambda: torch.empty(32, 64), **given)  # type: ignore[arg-type]  # what each test is about


def test_a_verdict_is_given_for_any_size():
    found = weigh()
    assert found.verdict("80GiB") == "fits"
    assert found.verdict(1000) == "too_large"
    assert sum(found.breakdown.values()) == found.peak_allocated <= found.peak_reserved


def test_fully_shard_is_weighed_too():
    theirs = weigh(assumed=fsdpctl.Assumed(engine="fsdp2"))
    assert theirs.breakdown["optimizer_states"] > 0


@pytest.mark.parametrize(
    ("about", "part"),
    [
        ({"sharding": "full_shart"}, "did you mean full_shard?"),
        ({"assumed": fsdpctl.Assumed(device="gpu")}, "allowed is cuda, cpu"),
        ({"assumed": fsdpctl.Assumed(engine="fsdp")}, "did you mean fsdp2?"),
        ({"loss_fn": None}, "give loss_fn="),
        ({"loss_fn": lambda y: y.sum() * y.sum().item()}, "reads a value"),
        ({"sharding": fsdpctl.Sharding("hybrid_shard", dp_shard_size=3)}, "must divide"),
    ],
)
def test_mistakes_are_one_line(about, part):
    with pytest.raises(UsageError, match=".+") as error:
        weigh(**about)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
