"""Recurrent layers are traced as the kernels that GPUs run, whatever the length."""

import sys
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from fsdpctl.estimate.recurrences import _delta_rule, packages_of, with_kernels
from fsdpctl.estimate.trace import trace
from fsdpctl.predict.compute import Made, Pass
from tests.models.decoders import tiny_config

FAMILIES = {
    "qwen3_next": "flash-linear-attention", "kimi_linear": "flash-linear-attention",
    "mamba2": "mamba-ssm", "bamba": "mamba-ssm", "jamba": "mamba-ssm", "mamba": "mamba-ssm",
}  # fmt: skip


def tiny(family: str, device: str = "cpu") -> Any:
    config = tiny_config(family)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config).to(device)


def result(module: Any, length: int) -> Tensor:
    tokens = torch.zeros(2, length, dtype=torch.int64, device=module.device)
    logits: Tensor = module(tokens).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_gradients_are_those_of_the_plain_code(family):
    module = tiny(family)
    assert packages_of(module) == (FAMILIES[family],)
    plain = result(module, 12)
    with with_kernels():
        found = result(module, 12)
        found.sum().backward()
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    reached = {name for name, param in module.named_parameters() if param.grad is not None}
    module.zero_grad()
    plain.sum().backward()
    assert reached == {name for name, param in module.named_parameters() if param.grad is not None}


def passed(module: Any, length: int) -> Pass:
    def run() -> Tensor:
        loss = result(module, length).sum()
        loss.backward()
        module.zero_grad()
        return loss

    return trace(module, [], run, "cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_do_not_grow_with_the_length_and_memory_does(family):
    module = tiny(family, "meta")
    short, long = (passed(module, length) for length in (256, 2048))
    works = ([work for each in one.work.values() for work in each] for one in (short, long))
    counts = [Counter(work.name for work in of_one) for of_one in works]
    assert counts[0] == counts[1]
    sizes = [
        sum(each.nbytes for part in one.parts.values() for each in part if isinstance(each, Made))
        for one in (short, long)
    ]
    assert 4 < sizes[1] / sizes[0] < 66  # at most with the square


def test_checkpointing_frees_the_inputs():
    queries = torch.zeros(1, 64, 2, 8, requires_grad=True)
    made = [queries * 2 for _ in range(3)]
    watches = [weakref.ref(each) for each in made]

    def run(*given: Tensor) -> Tensor:
        query, key, value = (each + 1 for each in given)
        watches.extend(map(weakref.ref, (query, key, value)))
        return _delta_rule(query, key, value, query[..., 0], query[..., 0])[0]

    out = checkpoint(run, *made, use_reentrant=False)
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
