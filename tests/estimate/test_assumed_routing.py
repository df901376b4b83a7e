"""Estimates of models of transformers whose sizes depend on values."""

from unittest import mock

import pytest
import torch

from fsdpctl.errors import UsageError
from fsdpctl.estimate.device_operators import AssumedRouting
from fsdpctl.models.transformers_decoder import TransformersDecoder
from tests.commands.run import invoke
from tests.matrix import fast
from tests.models.decoders import save_decoder

DYNAMIC = {
    "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    "family", fast("jetmoe", slow=["diffllama", "longcat_flash", "llama", "blt", "xlnet"])
)
def test_estimates_have_a_figure_or_one_line(family, tmp_path):
    changes = {"max_position_embeddings": 128, "rope_parameters": DYNAMIC}
    save_decoder(family, tmp_path, **(changes if family == "llama" else {}))
    args = "model=hf", f"model.path={tmp_path}", "train.seq_len=64"
    code, out = invoke("estimate-memory", *args)
    assert (code == 0 and "verdict" in out) or (code == 2 and "\n" not in out)
    assert code == 0 or family in ("blt", "xlnet")


def test_a_family_that_cannot_be_traced_is_named(tmp_path):
    save_decoder("llama", tmp_path)
    error = NotImplementedError("no values\nmore")
    args = "model=hf", f"model.path={tmp_path}", "train.seq_len=64"
    with mock.patch.object(TransformersDecoder, "forward", side_effect=error):
        code, out = invoke("estimate-memory", *args)
    assert (code, out) == (2, "model: llama: not supported; a small copy fails: no values")


def test_tokens_are_assumed_to_choose_experts_evenly():
    aten, choices = torch.ops.aten, AssumedRouting(is_cuda=False)
    choices.result_of(aten.topk.default, (torch.empty(7, 4, device="meta"), 2), {})
    counts = torch.empty(4, dtype=torch.int64, device="meta")
    copied = choices.result_of(aten._to_copy.default, (counts,), {"device": torch.device("cpu")})
    assert isinstance(copied, torch.Tensor)
    assert copied.tolist() == [4, 4, 3, 3]
    indices = choices.result_of(aten.nonzero.default, (torch.empty(2, 7, device="meta"),), {})
    assert isinstance(indices, torch.Tensor)
    assert (indices.shape, choices.expert_index(indices[0, 0])) == ((4, 2), 0)
    with pytest.raises(UsageError, match="unknown before it runs"):
        choices.expert_index(counts)
