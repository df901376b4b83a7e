"""Decoders of transformers under `model=transformers`, beside transformers itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.comm.collectives import collectives_for
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.engine.model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.train.assemble import make_model
from tests.distributed import distributed
from tests.engine.test_parity import largest_difference
from tests.models.decoders import batches_of, load_decoder, save_decoder
from tests.reference import train_reference

CPU = torch.device("cpu")
STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer"]
SOME = ["qwen3_moe", "gemma2"]


def compose(folder: Path, *words: str) -> Config:
    fixed = ["model=transformers", f"model.path={folder}", "precision=fp32"]
    return compose_config([*fixed, *words]).config


def load(config: Config, strategy: str = "full_shard") -> ShardedModel:
    model = make_model(config, CPU, strategy=strategy, empty=True)
    load_weights(open_weights(config.model), model)
    return model


def our_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:], 9)
    return loss / tokens[:, 1:].numel()


def their_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def trains_as_transformers(rank: int, world_size: int, folder: Path, family: str) -> None:
    if rank == 0:
        save_decoder(family, folder)
    collectives_for(CPU).barrier()
    batches = batches_of(3, world_size)
    theirs = load_decoder(folder)
    losses = [float(their_loss(theirs, of[rank][0])) for of in batches[:1]]
    names = {name for name, _ in theirs.named_parameters()}
    expected = train_reference(theirs, their_loss, batches, lr=1e-3)
    for strategy in STRATEGIES:
        model = load(compose(folder), strategy)
        optimizer = ShardedAdamW(model, lr=1e-3)
        found = []
        for of_ranks in batches:
            loss = our_loss(model, of_ranks[rank][0])
            found.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert found[0] == pytest.approx(losses[0], abs=1e-6), strategy
        trained = model.state_dict()
        ours, wanted = ({n: state[n] for n in names} for state in (trained, expected))
        print(strategy, largest_difference(ours, wanted))
        assert largest_difference(ours, wanted) <= 1e-5, strategy


@pytest.mark.parametrize("family", SOME)
@distributed(world_size=2)
def test_trains_as_transformers(rank: int, world_size: int, family: str, tmp_path: Path) -> None:
    trains_as_transformers(rank, world_size, tmp_path / "in", family)
