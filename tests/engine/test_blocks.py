"""Recomputed and compiled blocks: saved operators, and equal gradients."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.config.compose import compose_config
from fsdpctl.engine.blocks import checkpoint_block, compile_block, missing_compiler, prepare_blocks
from fsdpctl.models.lora import set_trainable
from fsdpctl.models.transformers_decoder import TransformersDecoder
from tests.commands.run import TINY
from tests.engine.odd import checkpoint_all
from tests.models.decoders import drawn
from tests.models.test_transformers_attention import pair
from tests.operators import Operators

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
TOKENS = torch.arange(32).view(2, 16)


def decoder(mode: str = "none") -> TransformersDecoder:
    model = drawn(compose_config([*TINY, "model.vocab_size=64"]).config.model)
    for block in model.get_submodule("model.layers").children():
        if mode != "none":
            checkpoint_block(block, mode)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    model(TOKENS).logsumexp(-1).mean().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def operators(mode: str) -> Counter[str]:
    """Return the counts of operators in a forward and a backward."""
    model = decoder(mode)
    with Operators() as counted:
        gradients(model)
    return counted.counts


def test_recomputation_repeats_what_its_mode_does_not_keep():
    """A block saves four of seven products; backward does not need the last product."""
    none, full, selective = operators("none"), operators("full"), operators("selective")
    blocks = 2
    assert (full["mm"] - none["mm"], full[ATTENTION] - none[ATTENTION]) == (6 * blocks, blocks)
    assert (selective["mm"] - none["mm"], selective[ATTENTION]) == (3 * blocks, none[ATTENTION])


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_bit(mode):
    plain, recomputed = gradients(decoder()), gradients(decoder(mode))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("family, settings, draws", [
    ("qwen3", {}, False), ("qwen3", {"attention_dropout": 0.5}, True),
    ("mixtral", {"router_jitter_noise": 0.3}, True), ("phimoe", {"router_jitter_noise": 0.0}, True),
    ("llama", {"lora": 0.0}, False), ("llama", {"lora": 0.5}, True),
])  # fmt: skip
def test_recomputation_draws_what_forward_drew(family, settings, draws):
    """The random state is not saved if the decoder draws no random numbers."""
    adapters = settings.pop("lora", None)
    args = ["activation_checkpointing=full", "train.compile=false"]
    if adapters is not None:
        args += ["model.lora.rank=2", f"model.lora.dropout={adapters}"]
    config, results = compose_config(args).config, list[list[Tensor]]()
    for recomputes in (False, True):
        module = pair(family, settings)[1].train()
        if adapters is not None:
            set_trainable(module, config.model)
            with torch.no_grad():
                for name, param in [*module.named_parameters()]:
                    if param.is_meta:
                        owner, _, key = name.rpartition(".")
                        filled = nn.Parameter(torch.full(param.shape, 0.1))
                        setattr(module.get_submodule(owner), key, filled)
        if recomputes:
            prepare_blocks(module, config)
        torch.manual_seed(5)
        with mock.patch.object(torch, "get_rng_state", wraps=torch.get_rng_state) as rng_reads:
            results.append(gradients(module))
        assert bool(rng_reads.call_count) == (recomputes and draws)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputation_leaves_names_as_they_were():
    assert list(decoder("full").state_dict()) == list(decoder().state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns about its own code
@pytest.mark.parametrize("mode", ["none", "full", "selective", "offload"])
def test_compiled_blocks_share_one_graph_and_have_the_same_gradients(mode):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = decoder("none" if mode == "offload" else mode)
    blocks = list(model.get_submodule("model.layers").children())
    if mode == "offload":
        checkpoint_all(blocks, "full", offload=True)
    for block in blocks:
        compile_block(block)
    for ours, theirs in zip(gradients(model), gradients(decoder()), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "/no/such/compiler" in str(missing_compiler("cpu"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "gcc or clang" in str(missing_compiler("cuda"))


class Averages(nn.Module):
    """A codebook that updates its buffer, on which its output depends."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x - self.mean


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("make", [
    lambda: nn.BatchNorm1d(6),
    lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6).eval()),
    lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten()
    ),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    Averages,
])  # fmt: skip
def test_recomputation_changes_no_buffer_and_no_bit(make, mode):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), make(), nn.Linear(6, 6))
    recomputed, x = copy.deepcopy(plain), torch.randn(8, 6)
    checkpoint_block(recomputed, mode, restores_buffers=True)
    for _ in range(3):
        for module in (plain, recomputed):
            module(x).square().sum().backward()
    for named in ("named_buffers", "named_parameters"):
        pairs = zip(getattr(plain, named)(), getattr(recomputed, named)(), strict=True)
        for (name, expected), (_, result) in pairs:
            assert torch.equal(result, expected), name
            if named == "named_parameters":
                assert torch.equal(result.grad, expected.grad), name
