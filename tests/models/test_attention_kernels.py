"""Attention runs in the selected kernel, or in the next one if that kernel cannot run."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _cur_sdpa_kernel_backends

from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.device_operators import cuda_workspace, operators_of
from fsdpctl.models.attention import attend, attention_mask, import_kernels
from fsdpctl.models.attention_kernels import use_kernel
from fsdpctl.models.build_model import build_model
from fsdpctl.models.packed_documents import assumed_documents
from fsdpctl.training.callbacks.generation import Sampling, generate
from tests.operators import Operators

LAYERS, LENGTH, WINDOW = 3, 64, 16
FLASH = "_scaled_dot_product_flash_attention"
CUDNN, EFFICIENT = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"
VARLEN = "_varlen_attn"
ATTENTION = (FLASH, CUDNN, EFFICIENT, VARLEN, "bmm")


def seen_on_cuda(
    dtype: torch.dtype, kernel: str | None = None, *, window: int | None = None,
    packs: bool = False, kv_heads: int = 2,
) -> Counter[str]:  # fmt: skip
    """Return the operators of a forward, as a GPU would run them."""
    args = [f"model.num_layers={LAYERS}", f"model.num_kv_heads={kv_heads}", "model.vocab_size=50"]
    for arg in ("model_type=mistral", f"sliding_window={window or 'null'}"):
        args.append(f"model.overrides.{arg}")
    model = build_model(compose_config(args).config.model).to(dtype)
    import_kernels("cuda")
    with torch.device("meta"):
        tokens = torch.empty(2, LENGTH, dtype=torch.int64)
        options = {"documents": assumed_documents(2, LENGTH, "cuda")} if packs else {}
        with operators_of("cuda", kernel), Operators() as seen:
            model(tokens, **options)
    return seen.counts


def kernels_of(names: Counter[str]) -> dict[str, int]:
    return {name: names[name] for name in ATTENTION if names[name]}


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_float32_never_falls_back_to_the_math_kernel(window, packs, kv_heads):
    names = seen_on_cuda(torch.float32, window=window, packs=packs, kv_heads=kv_heads)
    assert kernels_of(names) == {EFFICIENT: LAYERS}
    assert names["masked_fill_"] == int(packs or window is not None)  # one for all layers


@pytest.mark.parametrize(("kernel", "window", "packs", "expected"), [
    (None, None, False, FLASH), (None, WINDOW, False, VARLEN), (None, None, True, VARLEN),
    (None, WINDOW, True, VARLEN), ("flash3", None, False, FLASH), ("cudnn", None, False, CUDNN),
    ("cudnn", WINDOW, False, VARLEN), ("cudnn", None, True, VARLEN),
    ("efficient", None, False, EFFICIENT), ("efficient", WINDOW, False, EFFICIENT),
    ("efficient", None, True, EFFICIENT),
])  # fmt: skip
def test_two_byte_dtypes_run_in_the_selected_kernel_or_the_next(kernel, window, packs, expected):
    names = seen_on_cuda(torch.bfloat16, kernel, window=window, packs=packs)
    assert kernels_of(names) == {expected: LAYERS}
    if expected == VARLEN:
        assert not names["tril"]


def test_the_math_kernel_runs_if_it_is_selected():
    assert set(kernels_of(seen_on_cuda(torch.bfloat16, "math"))) == {"bmm"}


def inputs(dtype: torch.dtype = torch.float32, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, count, LENGTH, 8, generator=generator) for count in (4, heads, heads)]
    q, k, v = (each.to(dtype).requires_grad_() for each in drawn)
    return q, k, v


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_kernels_agree_on_the_cpu(kernel, window):
    results = []
    for name in (None, kernel):
        q, k, v = inputs()
        seen = attention_mask(q.transpose(1, 2), 8, window, None)
        with use_kernel(name), Operators() as ran:
            out = attend(q, k, v, seen)
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        results.append((out, *grads))
    assert bool(ran.counts["bmm"]) == (kernel == "math")
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_only_the_fallbacks_of_a_kernel_replace_it():
    preferred = partial(_cur_sdpa_kernel_backends, with_priority=True)
    before, names = preferred(), ["cudnn_attention", "flash_attention", "efficient_attention"]
    for number, kernel in enumerate(("cudnn", "flash", "efficient")):
        with use_kernel(kernel):
            results = [each.name.lower() for each in preferred()]
        assert results == [*names[number:], "math"]
    assert preferred() == before


def test_a_later_flash_attention_is_activated_and_restored(monkeypatch):
    from torch.nn import attention

    impls = dict(attention._registry._FLASH_ATTENTION_IMPLS)
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_IMPLS", impls)
    handle = SimpleNamespace(remove=lambda: None)
    attention.register_flash_attention_impl("FA3", register_fn=lambda: handle)
    with use_kernel("flash3"):
        assert ("FA3", handle) == attention._registry._FLASH_ATTENTION_ACTIVE
    if hasattr(attention, "restore_flash_attention_impl"):
        assert attention._registry._FLASH_ATTENTION_ACTIVE is None


def test_a_missing_package_is_a_one_line_error():
    with (
        pytest.raises(UsageError, match=r"model\.attention=flash3: not available: .*") as caught,
        use_kernel("flash3"),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_text_is_generated_without_cudnn():
    backends = []

    class Model(torch.nn.Module):
        def forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
            backends.append(torch.backends.cuda.cudnn_sdp_enabled())
            return torch.zeros(1, tokens.shape[1], 5)

    options: dict[str, Any] = {"context": 4, "sampling": Sampling(0), "device": torch.device("cpu")}
    assert len(list(generate(Model(), [1], range(3), **options, use_cache=False))) == 3
    assert backends == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled()


def workspace(kernel: str, dtype: torch.dtype, kv_heads: int) -> int:
    op = {
        "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
        "efficient": torch.ops.aten._scaled_dot_product_efficient_attention_backward,
    }.get(kernel, torch.ops.aten._scaled_dot_product_flash_attention_backward)
    query = torch.empty(1, 8, 256, 128, dtype=dtype, device="meta")
    key = torch.empty(1, kv_heads, 256, 128, dtype=dtype, device="meta")
    return cuda_workspace(op.default, [query, query, key], kernel)


def test_each_kernel_has_its_own_workspace():
    rows, bf16 = 8 * 256, torch.bfloat16
    alone = rows * 4 * (1 + 128)
    assert workspace("flash", bf16, 8) == workspace("flash3", bf16, 8) == alone
    assert workspace("flash", bf16, 2) == alone + 2 * 2 * rows * 128
    later = alone + 2 * 4 * 2 * 256 * 128
    assert workspace("flash3", bf16, 2) == workspace("cudnn", bf16, 2) == later
    assert workspace("efficient", torch.float32, 8) == alone
