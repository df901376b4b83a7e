"""Recurrent layers and experts are traced as the kernels that GPUs run."""

import sys
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from fsdpctl.estimate.device_operators import operators_of
from fsdpctl.estimate.library_kernels import _delta_rule, fuse_experts, packages_of, with_kernels
from fsdpctl.estimate.trace import trace
from fsdpctl.predict.model_pass import Alloc, TracedPass
from tests.models.decoders import tiny_config

TOKENS, WIDTH, INNER, COUNT, CHOSEN = 64, 32, 48, 4, 2
FAMILIES = {
    "qwen3_next": "flash-linear-attention", "kimi_linear": "flash-linear-attention",
    "mamba2": "mamba-ssm", "bamba": "mamba-ssm", "jamba": "mamba-ssm", "mamba": "mamba-ssm",
}  # fmt: skip


def tiny(family: str, device: str = "cpu") -> Any:
    config = tiny_config(family)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config).to(device)


def result(module: Any, length: int) -> Tensor:
    logits: Tensor = module(torch.zeros(2, length, dtype=torch.int64, device=module.device)).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_gradients_are_those_of_the_plain_code(family):
    module = tiny(family)
    assert packages_of(module) == (FAMILIES[family],)
    plain = result(module, 12)
    with with_kernels():
        actual = result(module, 12)
        actual.sum().backward()
    assert (actual.shape, actual.dtype) == (plain.shape, plain.dtype)
    reached = {name for name, param in module.named_parameters() if param.grad is not None}
    module.zero_grad()
    plain.sum().backward()
    assert reached == {name for name, param in module.named_parameters() if param.grad is not None}


def passed(module: Any, length: int) -> TracedPass:
    def run() -> Tensor:
        loss = result(module, length).sum()
        loss.backward()
        module.zero_grad()
        return loss

    return trace(module, [], run, "cuda", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_do_not_grow_with_the_length_and_memory_does(family):
    module = tiny(family, "meta")
    short, long = (passed(module, length) for length in (256, 2048))
    works = ([work for each in one.work.values() for work in each] for one in (short, long))
    counts = [Counter(work.name for work in of_one) for of_one in works]
    assert counts[0] == counts[1]
    sizes = [
        sum(each.nbytes for part in one.events.values() for each in part if isinstance(each, Alloc))
        for one in (short, long)
    ]
    assert 4 < sizes[1] / sizes[0] < 66  # growth is at most quadratic


def test_checkpointing_frees_the_inputs():
    queries = torch.zeros(1, 64, 2, 8, requires_grad=True)
    inputs = [queries * 2 for _ in range(3)]
    watches = [weakref.ref(each) for each in inputs]

    def run(*args: Tensor) -> Tensor:
        query, key, value = (each + 1 for each in args)
        watches.extend(map(weakref.ref, (query, key, value)))
        return _delta_rule(query, key, value, query[..., 0], query[..., 0])[0]

    out = checkpoint(run, *inputs, use_reentrant=False)
    assert [watch() is None for watch in watches] == [False] * 3 + [True] * 3
    out.sum().backward()
    assert queries.grad is not None


def test_layers_without_recurrences_need_no_package():
    config = tiny_config("granitemoehybrid")
    config.layer_types = ["attention"] * len(config.layer_types)
    assert packages_of(AutoModelForCausalLM.from_config(config)) == ()


def test_the_plain_code_is_restored():
    code = sys.modules[type(tiny("mamba")).__module__]
    plain = code.mamba_selective_scan
    with with_kernels():
        assert code.mamba_selective_scan is not plain
    assert code.mamba_selective_scan is plain


class Experts(nn.Module):
    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(COUNT, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(COUNT, WIDTH, INNER))
        if biased:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(COUNT, 2 * INNER))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x


def test_fused_experts_keep_the_products_before_the_gate_and_nothing_else_of_their_size():
    with torch.device("meta"):
        experts, x = Experts().bfloat16(), torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
        weights = torch.empty(TOKENS, CHOSEN, dtype=torch.bfloat16, requires_grad=True)
        index = torch.empty(TOKENS, CHOSEN, dtype=torch.int64)
    fuse_experts(experts)
    saved: list[tuple[int, ...]] = []
    gradients: list[torch.Size] = []
    for param in experts.parameters():
        param.register_hook(lambda gradient: gradients.append(gradient.shape))

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    def run() -> Tensor:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out: Tensor = experts(x.requires_grad_(), index, weights)
        loss = out.sum()
        loss.backward()
        return loss

    with operators_of("cuda", None):
        trace(experts, [], run, "cuda", None)
    rows = TOKENS * CHOSEN
    assert (rows, 2 * INNER) in saved
    assert {shape for shape in saved if rows in shape} == {(rows, 2 * INNER)}
    assert {param.shape for param in experts.parameters()} == set(gradients)


def test_experts_with_biases_or_adapters_stay_as_they_are():
    biased, adapted = Experts(biased=True), Experts()
    adapted.expert_adapters = nn.Linear(2, 2)
    for experts in (biased, adapted):
        fuse_experts(experts)
        assert "forward" not in vars(experts)
