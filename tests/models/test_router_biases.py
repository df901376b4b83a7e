"""Routers' biases that follow the tokens of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpctl.comm.collectives import collectives_for
from fsdpctl.errors import UsageError
from fsdpctl.models.router_biases import bias_places
from tests.distributed import distributed
from tests.matrix import fast
from tests.models.decoders import CPU, batches_of, compose, load, plain_module, save_decoder

RATE = 0.01
UPDATED = f"model.router_bias_update={RATE}"


def chosen_in(module: Any, tokens: Tensor) -> list[Tensor]:
    """How many of these tokens each expert gets, by layer."""
    found: list[Tensor] = []
    handles = [
        experts.register_forward_pre_hook(
            lambda _, args, n=getattr(owner, name).numel(): found.append(
                F.one_hot(args[1], n).sum(dim=(0, 1)).float()
            )
        )
        for experts, owner, name in bias_places(module)
    ]
    with torch.no_grad():
        module.eval()(tokens)
        module.train()
    for handle in handles:
        handle.remove()
    return found


def biases(module: Any) -> list[Tensor]:
    return [getattr(owner, name).detach().clone() for _, owner, name in bias_places(module)]


@pytest.mark.parametrize(
    "case",
    fast(
        "deepseek_v3 full",
        slow=["glm4_moe selective", "lfm2_moe none", "minimax_m2 full", "longcat_flash none"],
    ),
)
def test_an_expert_with_few_tokens_is_chosen_more_often_afterwards(case, tmp_path):
    """Padding does not count, nor what is recomputed, nor a forward without targets."""
    family, recomputes = case.split()
    save_decoder(family, tmp_path)
    module: Any = plain_module(tmp_path, UPDATED, f"activation_checkpointing={recomputes}")
    tokens = batches_of(1, 1)[0][0][0]
    targets = tokens[:, 1:].clone()
    targets[1] = -100  # a row that fills the batch
    before, counts = biases(module), chosen_in(module, tokens[:1, :-1])
    assert counts
    for _ in range(2):  # as many tokens twice
        module(tokens[:, :-1], targets, 9).backward()
    module.router_biases.update(None, torch.ones(()))  # a step that is skipped
    assert all(map(torch.equal, biases(module), before))
    module(tokens[:, :-1], targets, 9).backward()
    module.router_biases.update(lambda summed: summed, torch.zeros(()))
    for now, was, count in zip(biases(module), before, counts, strict=True):
        assert torch.equal(now, was + RATE * (count.mean() - count).sign().view_as(was))
    after = biases(module)
    module.router_biases.update(None)  # nothing has run
    assert all(map(torch.equal, biases(module), after))


@distributed(world_size=2)
def test_the_tokens_of_all_ranks_count(rank: int, world_size: int, tmp_path: Path) -> None:
    if rank == 0:
        save_decoder("deepseek_v3", tmp_path / "in")
    collectives_for(CPU).barrier()
    model = load(compose(tmp_path / "in", UPDATED))
    of_ranks = [batch for (batch,) in batches_of(1, world_size)[0]]
    alone = plain_module(tmp_path / "in", UPDATED)
    counts = chosen_in(alone, torch.cat(of_ranks)[:, :-1])
    tokens = of_ranks[rank]
    module: Any = model.module
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    module.router_biases.update(model.collectives.all_reduce)
    for now, count in zip(biases(module), counts, strict=True):
        assert torch.equal(now, RATE * (count.mean() - count).sign())


def test_models_without_such_biases_are_rejected(tmp_path):
    for family, reason in {
        "qwen3_moe": "only valid with a model whose routers have biases",
        "ernie4_5_moe": "not supported for biases that are parameters",
    }.items():
        save_decoder(family, tmp_path / family)
        with pytest.raises(UsageError, match=f"router_bias_update=0.01: {reason}"):
            plain_module(tmp_path / family, UPDATED)
