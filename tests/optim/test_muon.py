"""Muon on owned matrices is torch's Muon in one process, to the bit."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.api import load_checkpoint, save_checkpoint
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Config
from fsdpctl.engine.model import ShardedModel
from fsdpctl.engine.shard import shard_model
from fsdpctl.errors import UsageError
from fsdpctl.models.registry import initialize_parameter
from fsdpctl.optim.muon import ShardedMuon
from fsdpctl.resolve.machine import placed_on_cluster, resolved_strategy
from fsdpctl.resolve.preflight import check_optimizer
from fsdpctl.train.assemble import make_model, make_module, make_optimizer
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss, token_batches
from tests.engine.odd import KINDS, Kind
from tests.engine.test_parity import largest_difference
from tests.matrix import WHOLE, cases, fast
from tests.reference import PaddedAdamW, train_reference

LR, DECAY = 1e-2, 0.1
SHARDINGS = [
    ("shard_optimizer", "matrices"),
    ("no_shard", "even"),
    ("shard_optimizer", "round_robin"),
    ("shard_optimizer", "contiguous"),
]
ODD = ["tied embedding", "used on some ranks", "never used", "recomputed", "used later"]
WINDOWS = {"one": 1, "last": 3}


def is_matrix(name: str, param: Tensor) -> bool:
    return ("blocks." in name or ".layers." in name or ".h." in name) and param.ndim > 1


def whole(name: str, param: Tensor) -> list[Tensor]:
    return [param]


class TorchMuon:
    """torch.optim.Muon over the matrices in parameters of blocks, and AdamW over the others."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        lr: float,
        weight_decay: float,
        *,
        matrices_of: Callable[[str, Tensor], list[Tensor]] = whole,
        **muon: object,
    ) -> None:
        self._matrices_of = matrices_of
        self._params = {name: p for name, p in params.items() if is_matrix(name, p)}
        self._copies = {
            name: [nn.Parameter(each.detach().clone().contiguous()) for each in self._cut(name, p)]
            for name, p in self._params.items()
        }
        copies = [each for of_param in self._copies.values() for each in of_param]
        settings = {"adjust_lr_fn": "match_rms_adamw", **muon}
        self._muon = torch.optim.Muon(copies, lr, weight_decay, **settings)
        rest = {name: p for name, p in params.items() if name not in self._params}
        self._adamw = PaddedAdamW(rest, lr, weight_decay)

    def _cut(self, name: str, values: Tensor) -> list[Tensor]:
        return self._matrices_of(name, values)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> None:
        for name, copies in self._copies.items():
            gradient = gradients.get(name)
            pieces = [None] * len(copies) if gradient is None else self._cut(name, gradient)
            for copy, piece in zip(copies, pieces, strict=True):
                copy.grad = None if piece is None else piece.clone().contiguous()
        self._muon.step()
        for name, param in self._params.items():
            for target, copy in zip(self._cut(name, param), self._copies[name], strict=True):
                target.copy_(copy)
        self._adamw.step(gradients)


def train(model: ShardedModel, optimizer: ShardedMuon, batches: list[list[Tensor]], loss) -> None:
    """A step on each of the lists of micro-batches, of which the last reduces."""
    for micro_batches in batches:
        for number, batch in enumerate(micro_batches, start=1):
            with model.no_sync() if number < len(micro_batches) else nullcontext():
                (loss(model, batch) / len(micro_batches)).backward()
        zero = torch.zeros(())
        optimizer.step(grad_scale=zero + 1, found_inf=zero)
        optimizer.zero_grad()


def odd_cases(whole: bool) -> Iterator[tuple[tuple[str, str], Kind, int]]:
    shardings, windows = SHARDINGS if whole else SHARDINGS[:2], list(WINDOWS)
    for sharding, name, window in cases(shardings, ODD, windows, whole=whole):
        yield sharding, KINDS[name], WINDOWS[window]


@WHOLE
@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3]))
@distributed(timeout=120)
def test_equals_one_process(rank: int, world_size: int, whole: bool) -> None:
    for number, ((strategy, owner_map), kind, window) in enumerate(odd_cases(whole)):
        batches = kind.batches(3, world_size, window)
        model = shard_model(kind.make(), strategy, owner_map=owner_map)
        optimizer = ShardedMuon(model, lr=LR)
        train(model, optimizer, [of_ranks[rank] for of_ranks in batches], kind.loss)
        found = model.state_dict()
        if number % world_size == rank:
            wanted = train_reference(kind.make(), kind.loss, batches, make_optimizer=TorchMuon)
            assert largest_difference(found, wanted) == 0.0, (strategy, owner_map, kind, window)
