"""Decoders of transformers run our attention: documents and padding compute as if alone."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from fsdpctl.engine.blocks import checkpoint_blocks
from fsdpctl.models.attention_sinks import varlen_attention_with_sinks
from fsdpctl.models.module_spec import block_names
from fsdpctl.models.packed_documents import pack_documents, token_ranges
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.recomputation import block_checkpointing
from tests.matrix import fast
from tests.models.decoders import CPU, tiny_config
from tests.models.test_packed import gradients, summed

LENGTHS = ((5, 1, 17, 25), (30, 1, 1, 16))  # the last ones are padding
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4, "original_max_position_embeddings": 16, "partial_rotary_factor": 1.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
WINDOW = {"sliding_window": 7}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": WINDOW, "phi3": {"rope_parameters": LONG, "max_position_embeddings": 64},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "gpt2": {}, "gemma": {}, "gemma2": WINDOW, "gemma3_text": WINDOW, "qwen3_moe": {},
    "llama4_text": {"attention_chunk_size": 7}, "mistral": WINDOW, "starcoder2": WINDOW,
    "cohere2": WINDOW, "olmo3": WINDOW, "deepseek_v3": {}, "phimoe": {}, "opt": {}, "biogpt": {},
    "bloom": {}, "falcon": {}, "xglm": {}, "afmoe": WINDOW, "smollm3": {}, "minicpm3": {},
}  # fmt: skip


def pair(family: str, settings: dict[str, Any]) -> tuple[Any, TransformersDecoder]:
    """Return transformers' module with drawn weights, and ours with the same weights."""
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    make: Any = hf.AutoModelForCausalLM
    theirs = make.from_config(config).float().eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.normal_(0.0, 0.5 / param.shape[-1] ** 0.5 if param.ndim > 1 else 0.5)
    return theirs, TransformersDecoder(copy.deepcopy(theirs))


def rows() -> tuple[Tensor, Tensor]:
    """Return tokens and targets; padding is masked."""
    tokens, targets = torch.randint(3, 30, (2, 2, 48), generator=torch.Generator().manual_seed(1))
    for row, lengths in enumerate(LENGTHS):
        targets[row, -lengths[-1] :] = -100
    return tokens, targets


def agree(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    largest = max(float(each.abs().max()) for each in theirs.values())
    for name, gradient in theirs.items():
        result = ours.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(result / largest, gradient / largest, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "family",
    fast("gpt_oss", "phi3", slow=[each for each in FAMILIES if each not in {"gpt_oss", "phi3"}]),
)
def test_documents_compute_as_alone_in_transformers(family):
    theirs, ours = pair(family, FAMILIES[family])
    tokens, targets = rows()
    with torch.no_grad():
        for part in (tokens, tokens[:1, :3], tokens):  # an earlier forward leaves no state
            plain = theirs(part, use_cache=False).logits
            torch.testing.assert_close(ours(part), plain, rtol=0, atol=1e-5)
    loss = summed(ours(tokens, documents=pack_documents(LENGTHS, CPU)), targets)
    loss.backward()
    wanted = 0.0
    for row, lengths in enumerate(LENGTHS):
        for start, end in token_ranges(lengths[:-1]):
            fresh = pair(family, FAMILIES[family])[0]  # dynamic embeddings remember lengths
            logits = fresh(tokens[row : row + 1, start:end], use_cache=False).logits
            alone = summed(logits, targets[row : row + 1, start:end])
            alone.backward()
            wanted += alone.item()
            for name, gradient in gradients(fresh).items():
                param = theirs.get_parameter(name)
                param.grad = gradient + (0 if param.grad is None else param.grad)
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    agree(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("family", fast("gpt_oss", slow=["gemma2", "llama4_text", "phi3"]))
def test_layers_that_backward_recomputes_see_the_same(family):
    """Another forward runs between a forward and its backward."""
    _, module = pair(family, FAMILIES[family])
    tokens, targets = rows()
    results = []
    for recomputes in (False, True):
        if recomputes:
            blocks = [module.get_submodule(name) for name in block_names(module)]
            checkpoint_blocks(blocks, block_checkpointing("full", None, len(blocks), offload=False))
        loss = module(tokens, targets, documents=pack_documents(LENGTHS, CPU))
        with torch.no_grad():
            module(tokens[:, :9])
        loss.backward()
        results.append(gradients(module))
    agree(*results)


def test_dropout_of_attention_is_applied_in_training():
    _, module = pair("qwen3", {"attention_dropout": 0.5})
    tokens, _ = rows()
    for options in ({}, {"documents": pack_documents(LENGTHS, CPU)}):
        once, again = (module.train(True)(tokens, **options) for _ in range(2))
        assert not torch.equal(once, again)
        once, again = (module.train(False)(tokens, **options) for _ in range(2))
        assert torch.equal(once, again)


def emulated(offsets: Tensor, window: int, scale: float, q: Tensor, k: Tensor) -> Any:
    """Yield the tokens of each sequence, and its scores per head."""
    for start, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        positions = torch.arange(end - start)
        distance = positions[:, None] - positions
        sees = (distance >= 0) & ((distance <= window) | (window < 0))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * scale
        yield slice(start, end), scores.masked_fill(~sees, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *options: Any) -> Any:
    """Return what the documentation of the CUDA operator states."""
    *_, scale, (window, _), shares = options
    assert not shares
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for part, scores in emulated(offsets, window, scale, q, k):
        out[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part])
        lse[:, part] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> Any:
    """Compute the backward of Dao et al., FlashAttention, 2022, from the given log-sum-exp."""
    offsets, *_, scale, (window, _) = options
    assert lse.is_contiguous()
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    for part, scores in emulated(offsets, window, scale, q, k):
        odds = torch.exp(scores - lse[:, part, None])
        dv[part] = torch.einsum("hqk,qhd->khd", odds, grad[part])
        product = (grad[part] * out[part]).sum(-1).t().unsqueeze(-1)
        ds = odds * (torch.einsum("qhd,khd->hqk", grad[part], v[part]) - product) * scale
        dq[part] = torch.einsum("hqk,khd->qhd", ds, k[part])
        dk[part] = torch.einsum("hqk,qhd->khd", ds, q[part])
    return dq, dk, dv


@pytest.mark.parametrize("window", [-1, 5])
def test_sinks_are_exact_with_a_kernel_that_has_none(monkeypatch, window):
    operators = SimpleNamespace(_varlen_attn=forward, _varlen_attn_backward=backward)
    monkeypatch.setattr(torch.ops, "torch_attn", operators)
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = torch.randn(4, 48, 4, 8, generator=generator, dtype=torch.float64)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (q, k, v, sinks)]
    offsets = pack_documents(((5, 1, 17, 25),), CPU).offsets
    mixed = varlen_attention_with_sinks(q, k, v, sinks, offsets, (32, window, 0.3))
    result = torch.autograd.grad(mixed, inputs, gradient)
    parts = []
    for part, scores in emulated(offsets, window, 0.3, q, k):
        every = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
        parts.append(torch.einsum("hqk,khd->qhd", every.softmax(-1)[..., :-1], v[part]))
    expected = torch.cat(parts)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-12)
    for one, other in zip(result, torch.autograd.grad(expected, inputs, gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
