"""Documents that share a row compute, and are trained, as if each were alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fsdpctl.config.compose import compose_config
from fsdpctl.models import attention
from fsdpctl.models.attention import attend, attention_mask
from fsdpctl.models.build_model import build_model
from fsdpctl.models.packed_documents import pack_documents, token_ranges
from fsdpctl.models.small_copy import allocate
from fsdpctl.models.transformers_build import fill_buffers
from fsdpctl.models.transformers_decoder import TransformersDecoder
from tests.matrix import fast
from tests.models.families import FEW, LENGTH, OTHERS, VOCABULARY, save_model

LENGTHS = ((5, 1, 17, 25), (30, 1, 1, 16))  # rows of 48
CPU = torch.device("cpu")
Loss = Callable[[Tensor, Tensor], Tensor]


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def rows() -> tuple[Tensor, Tensor]:
    """Return tokens and targets; the last documents are masked."""
    drawn = torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens, targets = drawn
    targets[:, -10:] = -100
    return tokens, targets


def alone() -> list[tuple[Tensor, Tensor]]:
    tokens, targets = rows()
    return [
        (tokens[row : row + 1, start:end], targets[row : row + 1, start:end])
        for row, lengths in enumerate(LENGTHS)
        for start, end in token_ranges(lengths)
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    results = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            results[name], param.grad = param.grad, None
    return results


def opened(folder: Path) -> Any:
    config = compose_config(["model=hf", f"model.path={folder}"]).config
    model: Any = build_model(config.model)
    if isinstance(model, TransformersDecoder):
        fill_buffers(model)
    allocate(model)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(theirs.state_dict())
    return model


@pytest.mark.parametrize("kernel", ["cpu", "mask"])
@pytest.mark.parametrize("family", fast(*FEW, slow=OTHERS))
def test_a_packed_row_equals_its_documents_alone(tmp_path, family, kernel):
    theirs = save_model(family, tmp_path)
    ours = opened(tmp_path)
    documents = pack_documents(LENGTHS, CPU, kernel_device="cpu" if kernel == "cpu" else "cuda")
    tokens, targets = rows()
    logits = ours(tokens, documents=documents)
    summed(logits, targets).backward()
    grads = gradients(ours)
    for part, wanted in alone():
        summed(theirs(part, use_cache=False).logits, wanted).backward()
    expected = gradients(theirs)
    apart = [theirs(part, use_cache=False).logits for part, _ in alone()]
    torch.testing.assert_close(logits, torch.cat(apart, 1).view_as(logits), rtol=0, atol=1e-5)
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) or 1.0
        torch.testing.assert_close(grads[name] / scale, gradient / scale, rtol=0, atol=1e-5)


def test_without_documents_a_row_has_other_results(tmp_path):
    save_model("llama", tmp_path)
    ours, (tokens, _) = opened(tmp_path), rows()
    apart = ours(tokens, documents=pack_documents(LENGTHS, CPU))
    assert (ours(tokens) - apart).abs().max() > 0.1


def emulated(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *rest: Any, **options: Any) -> Any:
    """Compute what the documentation of the CUDA kernel states, in its layout."""
    key_offsets, max_q, max_k = rest
    left, right = options.pop("window_size")
    shares = options.pop("enable_gqa", False)
    assert not options
    assert right == 0
    assert offsets.dtype == key_offsets.dtype == torch.int32
    assert shares or q.shape[1] == k.shape[1]
    out = torch.empty_like(q)
    for start, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        assert end - start <= min(max_q, max_k)
        if start == end:
            continue
        positions = torch.arange(end - start)
        distance = positions[:, None] - positions
        sees = (distance >= 0) & ((distance <= left) | (left < 0))
        q_, k_, v_ = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=sees, enable_gqa=shares)
        out[start:end] = mixed[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("kernel_shares", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 9])
def test_the_kernel_for_cuda_gets_the_same_documents(monkeypatch, window, kv_heads, kernel_shares):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", emulated)
    monkeypatch.setattr(attention, "_varlen_has_gqa", lambda: kernel_shares)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, LENGTH, 8) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    packed = [pack_documents(LENGTHS, CPU, kernel_device=x) for x in ("cuda", "cpu")]
    flat, each = (attend(q, k, v, attention_mask(q[:, 0], 8, window, x)) for x in packed)
    torch.testing.assert_close(flat, each, rtol=2e-2, atol=2e-2)
    assert flat.transpose(1, 2).is_contiguous()


def test_documents_have_few_different_sizes():
    few, more = pack_documents(LENGTHS, CPU), pack_documents(((20, 28), (1, 2, 3, 4, 38)), CPU)
    assert few.offsets.tolist() == [0, 5, 6, 23, 48, 78, 79, 80, 96]
    assert (more.offsets.tolist(), few.max_length) == ([0, 20, 48, 49, 51, 54, 58, 96, 96], 32)
    assert more.max_length == 48


@pytest.mark.slow
@torch.no_grad()
def test_compiled_blocks_are_compiled_once(tmp_path):
    from torch._dynamo.testing import CompileCounter  # takes a second

    save_model("qwen3", tmp_path)
    ours = opened(tmp_path)
    tokens, _ = rows()
    expected = {
        lengths: ours(tokens, documents=pack_documents(lengths, CPU))
        for lengths in (LENGTHS, ((48,), (48,)), ((7, 41), (1,) * 48))
    }
    torch._dynamo.reset()
    counter = CompileCounter()
    for layer in ours.model.layers:
        layer.compile(backend=counter)
    for lengths, wanted in expected.items():
        result = ours(tokens, documents=pack_documents(lengths, CPU))
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-5)
    assert counter.frame_count == 1
