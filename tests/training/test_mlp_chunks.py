"""Feed-forward layers in chunks: equal losses with less memory."""

import pytest
import torch

from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.run_plan import make_run_plan, stored_config
from fsdpctl.training.assemble import make_module
from tests.matrix import fast
from tests.models.decoders import compose, plain_module, save_decoder
from tests.models.test_packed import gradients, summed
from tests.training.test_context import check_alike

CHUNKS = "train.mlp_chunk_tokens"


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ["activation_checkpointing=full", "model.lora.rank=4", "train.context_parallel=2"],
    ["model.overrides.model_type=mistral", "model.overrides.sliding_window=9"],
    ["model=gpt2", "model.num_kv_heads=4"],
    ["activation_checkpointing=selective", "accumulation=last"],
], ids=lambda more: more[0])  # fmt: skip
def test_losses_are_those_of_all_tokens_at_once(tmp_path, more):
    check_alike(tmp_path, 2, [0, 20], "train.seq_len=70", *more, key=CHUNKS)


@pytest.mark.parametrize("family", fast("llama", slow=["lfm2"]))
def test_a_model_of_transformers_has_chunks_too(tmp_path, family):
    save_decoder(family, tmp_path)
    tokens = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    results = []
    for chunk in (0, 7):
        model = plain_module(tmp_path, f"{CHUNKS}={chunk}", "activation_checkpointing=full")
        summed(model(tokens), tokens).backward()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "bloom"])  # experts; a layer with a residual
def test_other_layers_have_no_chunks(tmp_path, family):
    save_decoder(family, tmp_path)
    with pytest.raises(UsageError, match=rf"{CHUNKS}=7: .*0 has no feed-forward layer"):
        make_module(compose(tmp_path, f"{CHUNKS}=7"))


def test_chunks_need_less_memory_and_are_few():
    args = ["model=llama3_8b", "model.num_layers=2", "cluster=h100", "launch.nproc_per_node=8",
             "train.seq_len=1048576", "model.max_seq_len=1048576", "train.context_parallel=8",
             "train.global_batch_size=1", "model.vocab_size=512",
             "activation_checkpointing=full"]  # fmt: skip
    config = stored_config(assign_ranks(compose_config([*args, f"{CHUNKS}=auto"]).config))
    chunk = make_run_plan(config).config.train.mlp_chunk_tokens
    assert chunk == 12544  # as much memory as 131,072 hidden states
    assert make_run_plan(config.changed({"train.seq_len": 8192})).config.train.mlp_chunk_tokens == 0
    with pytest.raises(UsageError, match=rf"{CHUNKS}=1023: .* expected at least 1024"):
        make_run_plan(config.changed({CHUNKS: 1023}))
    plain = config.changed({CHUNKS: 0})
    chunked, whole = (
        Estimator().estimate(make_run_plan(each)).step.allocated for each in (config, plain)
    )
    assert chunked < whole
