"""Norms of transformers' models with torch's operator: equal results, with less memory."""

from typing import Any

import pytest
import torch
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaWeightlessRMSNorm

from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.device_operators import operators_of
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.transformers_build import fuse_norms
from fsdpctl.models.transformers_decoder import TransformersDecoder
from tests.matrix import fast
from tests.models.decoders import drawn, save_decoder

TOKENS = torch.arange(24).view(2, 12)
FAMILIES = [
    "gemma4_text", "qwen3_moe", "gemma3_text", "gemma", "olmo2", "mixtral",
]  # fmt: skip


def saved_bytes(module: TransformersDecoder) -> int:
    """Return the bytes of the tensors that backward needs, on a GPU in bf16."""
    sizes: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return x

    module = module.bfloat16().to("meta")
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with torch.device("meta"), operators_of("cuda", None), hooks:
        module(TOKENS.to("meta"))
    return sum(sizes.values())


@pytest.mark.parametrize("family", fast(*FAMILIES[:2], slow=FAMILIES[2:]))
def test_results_are_the_same_with_less_memory(family, tmp_path):
    save_decoder(family, tmp_path)
    model = compose_config(["model=hf", f"model.path={tmp_path}", "model.init=random"]).config.model
    ours = drawn(model).train(False)
    theirs = build_base_model(model, transformers_norms=True)
    names = {type(each).__name__: type(each) for each in theirs.modules()}
    others = {type(each) for each in ours.modules()} - {*names.values()}
    norms = {each for each in names if each.endswith("RMSNorm")}
    assert {each.__name__ for each in others} == norms
    plain: Any = drawn(model).train(False)
    for name, each in theirs.named_modules():
        plain.get_submodule(name).__class__ = type(each)
    with torch.no_grad():
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            other.copy_(one.add_(0.1 * torch.randn_like(one)) if one.ndim < 2 else one)
    torch.testing.assert_close(ours(TOKENS), plain(TOKENS), rtol=0, atol=1e-5)
    assert saved_bytes(ours) < saved_bytes(plain)


def test_a_norm_that_has_a_weight_without_using_it_is_fused_without():
    norm = FalconMambaWeightlessRMSNorm(16, eps=1e-6)
    x = torch.randn(2, 16)
    expected = norm(x)
    fuse_norms(norm)
    assert type(norm) is not FalconMambaWeightlessRMSNorm
    torch.testing.assert_close(norm(x), expected)
