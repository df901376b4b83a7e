"""Muon on owned matrices is torch's Muon in one process, to the bit."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fsdpctl.checkpoint.api import load_checkpoint, save_checkpoint
from fsdpctl.config.compose import compose_config
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.errors import UsageError
from fsdpctl.models.module_spec import module_units
from fsdpctl.optim.muon import ShardedMuon
from fsdpctl.plan.layout import Span
from fsdpctl.plan.optimizers import MATRICES, MuonSettings, muon_flops, uses_muon
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.units import unit_layouts
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.rules import validate
from tests.distributed import distributed
from tests.engine.models import OddNet, make_net, next_token_loss, token_batches
from tests.engine.odd import KINDS, Kind, Stack
from tests.engine.test_parity import largest_difference
from tests.matrix import WHOLE, cases, fast
from tests.models.decoders import their_loss, tiny_config
from tests.predict.tensor_bytes import TensorBytes
from tests.reference import PaddedAdamW, train_reference

LR = 1e-2
SHARDINGS = [
    ("shard_optimizer", "matrices"), ("no_shard", "even"), ("shard_optimizer", "round_robin"),
    ("shard_optimizer", "contiguous"),
]  # fmt: skip
WINDOWS = {"one": 1, "last": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {}, "others": {"momentum": 0.9, "nesterov": False, "ns_steps": 3},
}  # fmt: skip


def is_matrix(name: str, param: Tensor) -> bool:
    if "router" in name:
        return False
    return ("blocks." in name or ".layers." in name or ".h." in name) and param.ndim > 1


def matrices(param: Tensor) -> list[Tensor]:
    """Return the matrices of several experts, or the parameter itself."""
    return list(param) if param.ndim == 3 else [param]


class TorchMuon:
    """Step matrices of blocks by torch.optim.Muon, and other parameters by AdamW."""

    def __init__(
        self, params: dict[str, nn.Parameter], lr: float, weight_decay: float, **muon: Any
    ) -> None:
        self._params = {name: p for name, p in params.items() if is_matrix(name, p)}
        self._copies = {
            name: [nn.Parameter(each.detach().clone().contiguous()) for each in matrices(p)]
            for name, p in self._params.items()
        }
        copies = [each for of_param in self._copies.values() for each in of_param]
        settings: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", **muon}
        self._muon = torch.optim.Muon(copies, lr, weight_decay, **settings)
        rest = {name: p for name, p in params.items() if name not in self._params}
        self._adamw = PaddedAdamW(rest, lr, weight_decay)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> None:
        for name, copies in self._copies.items():
            gradient = gradients.get(name)
            pieces = [None] * len(copies) if gradient is None else matrices(gradient)
            for copy, piece in zip(copies, pieces, strict=True):
                copy.grad = None if piece is None else piece.clone().contiguous()
        self._muon.step()
        for name, param in self._params.items():
            for target, copy in zip(matrices(param), self._copies[name], strict=True):
                target.copy_(copy)
        self._adamw.step(gradients)


def train(model: ShardedModel, optimizer: ShardedMuon, batches: list[list[Tensor]], loss) -> None:
    """Run a step for each list of micro-batches; the last micro-batch reduces."""
    for micro_batches in batches:
        for number, batch in enumerate(micro_batches, start=1):
            with model.no_sync() if number < len(micro_batches) else nullcontext():
                (loss(model, batch) / len(micro_batches)).backward()
        zero = torch.zeros(())
        optimizer.step(grad_scale=zero + 1, found_inf=zero)
        optimizer.zero_grad()


class Experts(nn.Module):
    """A block with a router and four matrices in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(13, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 13, 21) / 5)
        self.down = nn.Linear(21, 13)

    def forward(self, x):
        odds = torch.softmax(self.router(x), dim=-1)
        return x + self.down(torch.tanh(torch.einsum("bi,eio,be->bo", x, self.experts, odds)))


def decoder(family: str) -> nn.Module:
    """Return a model with fused layers, each of which is one matrix."""
    torch.manual_seed(0)
    module: nn.Module = AutoModelForCausalLM.from_config(tiny_config(family))
    return module.eval()  # without dropout


OF_MUON = {
    "gpt2": Kind(partial(decoder, "gpt2"), token_batches, their_loss),
    "experts": Kind(partial(Stack, Experts)),
    **{name: KINDS[name] for name in ("tied embedding", "used on some ranks")},
    **{name: KINDS[name] for name in ("never used", "recomputed", "used later")},
    **{name: Kind(partial(decoder, name), token_batches, their_loss) for name in ("phi3", "qwen3")},
}  # fmt: skip


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3]))
@distributed(timeout=120)
def test_equals_one_process(rank: int, world_size: int, whole: bool) -> None:
    shardings, kinds = (SHARDINGS, [*OF_MUON]) if whole else (SHARDINGS[:2], [*OF_MUON][:4])
    drawn = cases(shardings, kinds, [*WINDOWS], [*OPTIONS], whole=False)
    for number, (sharding, name, window, options) in enumerate(drawn):
        (strategy, owner_map), kind, settings = sharding, OF_MUON[name], OPTIONS[options]
        batches = kind.batches(3, world_size, WINDOWS[window])
        model = shard_model(kind.make(), strategy, owner_map=owner_map)
        optimizer = ShardedMuon(model, lr=LR, **settings)
        train(model, optimizer, [of_ranks[rank] for of_ranks in batches], kind.loss)
        state = model.state_dict()
        if number % world_size == rank:
            reference = partial(TorchMuon, **settings)
            wanted = train_reference(kind.make(), kind.loss, batches, make_optimizer=reference)
            assert largest_difference(state, wanted) == 0.0, (sharding, name, window, options)


@pytest.mark.parametrize("world_size", fast(2, slow=[1, 3]))
@distributed()
def test_a_run_resumes_bit_for_bit_elsewhere(rank: int, world_size: int, tmp_path: Path) -> None:
    batches = token_batches(4, world_size)
    rank_batches = [of_ranks[rank] for of_ranks in batches]
    plain = make_net(tied=True)
    wanted = train_reference(plain, next_token_loss, batches, make_optimizer=TorchMuon)
    ways = [
        ("shard_optimizer", "matrices"), ("no_shard", "even"), ("shard_optimizer", "contiguous"),
    ]  # fmt: skip
    for number, (strategy, owner_map) in enumerate(ways):
        model = shard_model(make_net(tied=True), strategy, owner_map=owner_map)
        optimizer = ShardedMuon(model, lr=LR)
        train(model, optimizer, rank_batches[:2], next_token_loss)
        save_checkpoint(tmp_path / f"{number}", model, optimizer)
        assert "momentum_buffer" in {key for _, states in optimizer.span_states() for key in states}
        strategy, owner_map = ways[number - 1]
        again = shard_model(make_net(tied=True), strategy, owner_map=owner_map)
        optimizer = ShardedMuon(again, lr=LR)
        load_checkpoint(tmp_path / f"{number}", again, optimizer)
        train(again, optimizer, rank_batches[2:], next_token_loss)
        assert largest_difference(again.state_dict(), wanted) == 0.0


def test_a_skipped_step_changes_nothing_and_a_scale_divides_the_gradient() -> None:
    states = []
    for scale in (None, torch.full((), 4.0)):
        model = shard_model(make_net(tied=True))
        optimizer = ShardedMuon(model, lr=LR)
        for step, of_ranks in enumerate(token_batches(4, 1)):
            before = model.state_dict()
            next_token_loss(model, of_ranks[0][0]).backward()
            for shard in model.flat_shards():
                assert shard.grad is not None
                if step % 2:
                    shard.grad.fill_(float("nan"))
                elif scale is not None:
                    shard.grad.mul_(scale)
            skips = None if step % 2 == 0 and scale is None else torch.tensor(float(step % 2))
            optimizer.step(grad_scale=scale, found_inf=skips)
            optimizer.zero_grad()
            assert (largest_difference(model.state_dict(), before) == 0.0) == (step % 2 == 1)
        states.append(model.state_dict())
    assert largest_difference(*states) == 0.0


def test_matrices_go_whole_to_ranks_with_like_work() -> None:
    units = module_units(OddNet(tied=True, num_blocks=12), None)
    for ranks in (2, 3, 5, 8):
        layouts = [each for of in unit_layouts(units, ranks, MATRICES).values() for each in of]
        work = [0] * ranks
        for layout in layouts:
            for rank, part in enumerate(layout.shard_spans):
                for piece in layout.param_slices(part):
                    work[rank] += muon_flops(piece.param)
                    if uses_muon(piece.param):
                        assert piece.in_param == Span(0, piece.param.numel)
        largest = max(muon_flops(param) for layout in layouts for param in layout.params)
        assert sum(work) == sum(muon_flops(p) for layout in layouts for p in layout.params)
        assert max(work) <= sum(work) / ranks + largest


@pytest.mark.parametrize(("args", "error"), [
    (["strategy=full_shard"], "expected shard_optimizer or no_shard"),
    (["strategy.owner_map=even"], "expected matrices, round_robin or contiguous"),
    (["engine=fsdp2", "strategy=full_shard"], "optimizer=muon: requires engine=fsdpctl"),
    (["model.lora.rank=4"], "use optimizer=adamw"),
    (["optimizer=sgd", "optimizer.nesterov=false"], "only valid with optimizer=muon"),
])  # fmt: skip
def test_what_muon_cannot_do_is_rejected_first(args: list[str], error: str) -> None:
    options = {arg.split("=")[0] for arg in args}
    usual = {"optimizer": "muon", "strategy": "shard_optimizer", "launch.nproc_per_node": "2"}
    usual_words = [f"{name}={value}" for name, value in usual.items() if name not in options]
    config = compose_config([*args, *usual_words]).config
    with pytest.raises(UsageError, match=error):
        validate(assign_ranks(config))


def test_a_model_without_matrices_or_with_cut_ones_is_rejected() -> None:
    net = make_net(tied=True)
    for param in net.blocks.parameters():
        param.requires_grad_(False)
    with pytest.raises(UsageError, match="no trainable matrix in a repeated block"):
        ShardedMuon(shard_model(net))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temporary_tensors_are_those_that_estimates_expect(dtype, nesterov):
    for shape in ((40, 24), (24, 40), (3, 30, 10)):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Blank(shape) for _ in range(2))).to(dtype)
        model = shard_model(blocks, precision=Precision(master_dtype=dtype))
        optimizer = ShardedMuon(model, lr=LR, nesterov=nesterov)
        model(torch.ones((), dtype=dtype)).backward()
        optimizer.create_states()
        shards = model.flat_shards()
        there = [each for shard in shards for each in (shard.master, shard.grad)]
        there += [value for state in optimizer.state.values() for value in state.values()]
        watch = TensorBytes([each for each in there if each is not None], [], lambda: 0)
        before, sizes, held, expected = watch._total, dict[str, int](), 0, 0
        with watch:
            optimizer.step(found_inf=torch.zeros(()))
        count, rows, columns = shape if len(shape) == 3 else (1, *shape)
        settings = MuonSettings(nesterov=nesterov)
        for name, nbytes in settings.tensors((count, rows, columns), dtype.itemsize):
            held += nbytes - sizes.get(name, 0)
            sizes[name] = nbytes
            expected = max(expected, held)
        assert 0 <= watch.peak - before - expected <= 16, shape  # scalars


class Blank(nn.Module):
    """A module with one parameter of a given shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()
