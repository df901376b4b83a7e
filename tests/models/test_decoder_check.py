"""A check of a small copy of a transformers decoder, before a run or an estimate."""

import signal
from dataclasses import replace

import pytest
from transformers import AutoConfig

from fsdpctl.config.schema import Resolved
from fsdpctl.errors import SignalError, StoppedError, UsageError
from fsdpctl.models import decoder_check
from fsdpctl.models.decoder_check import adapt_to_decoder, check_decoder, check_shared_rows
from fsdpctl.models.small_copy import meta_copy
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.run_plan import make_run_plan, stored_config
from tests.matrix import fast
from tests.models.decoders import compose, save_decoder

NO_INTERFACE = "does not use transformers' interface"
MASKS, ALONG = "needs a mask of all pairs of tokens", "layers mix tokens other than by attention"
# Why our attention is not used, whether documents can share a sequence, why ranks cannot share rows
DOES = {
    "qwen3_moe": ("", True, ""), "gpt_oss": ("", True, ""), "deepseek_v3": ("", True, ""),
    "gpt2": ("", True, "attn_pdrop=0.1: expected 0"), "bloom": (NO_INTERFACE, True, MASKS),
    "bart": ("", False, MASKS), "mamba2": (NO_INTERFACE, False, ALONG),
    "gemma3_text": ("", True, ""), "cohere2": ("", True, ""), "glm4": ("", True, ""),
    "phi": ("", True, ""), "git": ("masks of transformers", True, "dropout_prob=0.1: expected 0"),
    "inkling_text": ("attention with position_bias", False, "not supported"),
}  # fmt: skip


def shared(config: Resolved) -> Resolved:
    return replace(config, train=replace(config.train, context_parallel=2))


@pytest.mark.parametrize("family", fast(*[*DOES][:7], slow=[*DOES][7:]))
def test_the_start_finds_what_a_decoder_does(family, tmp_path):
    problem, packs, refusal = DOES[family]
    save_decoder(family, tmp_path)
    args = ["data=chat", "data.path=x.jsonl", "launch.nproc_per_node=2", "launch.device=cpu"]
    config = stored_config(assign_ranks(compose(tmp_path, *args)))
    result = check_decoder(config.model)
    assert (problem in result.attention_problem, bool(result.attention_problem)) == (
        True,
        bool(problem),
    )
    assert (result.isolates_documents, result.ignores_padding) == (packs, True)
    changed, notes = adapt_to_decoder(config)
    assert changed.data.packing is (None if packs else False)
    assert len(notes) == bool(problem) + (not packs)
    if not packs:
        with pytest.raises(UsageError, match=f"data.packing=true: {family} mixes"):
            adapt_to_decoder(compose(tmp_path, *args, "data.packing=true"))
    message = rf"context_parallel=2: model: .*{refusal}"
    for check in (check_shared_rows, make_run_plan) if refusal else ():
        with pytest.raises(UsageError, match=message):
            check(shared(config))
    if not refusal:
        check_shared_rows(shared(config))


@pytest.mark.parametrize(("family", "sizes"), [
    ("rwkv", {"hidden_size": 16_384, "attention_hidden_size": 16_384}),
    ("mamba2", {"hidden_size": 16_384, "num_heads": 512}),
    ("xlstm", {"hidden_size": 16_384, "num_heads": 32}),
])  # fmt: skip
def test_the_copy_of_a_wide_model_is_small(tmp_path, family, sizes):
    config = AutoConfig.for_model(family, **sizes, num_hidden_layers=2)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    module = meta_copy(compose(tmp_path, "model.init=random").model)
    assert sum(each.numel() for each in module.parameters()) < 1 << 24


def test_a_model_that_sees_later_tokens_is_rejected(tmp_path):
    save_decoder("electra", tmp_path)
    with pytest.raises(UsageError, match="not causal: tokens attend to later tokens"):
        check_decoder(compose(tmp_path).model)


def test_rotary_embeddings_that_depend_on_all_positions_are_those_of_full_rows(tmp_path):
    """A rank has only the positions of its part of a row."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4, "original_max_position_embeddings": 30}  # fmt: skip
    save_decoder("llama", tmp_path, rope_parameters=long)
    check_shared_rows(shared(compose(tmp_path, "train.seq_len=31")))


def test_few_learned_positions_suffice(tmp_path):
    """The samples of the check are longer than the model allows."""
    save_decoder("gpt2", tmp_path, n_positions=8, attn_pdrop=0.0)
    config = compose(tmp_path, "train.seq_len=8")
    assert not check_decoder(config.model).attention_problem
    check_shared_rows(shared(config))


def test_a_loss_over_full_rows_is_rejected(tmp_path):
    save_decoder("qwen3_moe", tmp_path, output_router_logits=True)
    with pytest.raises(UsageError, match=r"set model.router_aux_loss to global or none"):
        check_shared_rows(shared(compose(tmp_path)))
    check_shared_rows(shared(compose(tmp_path, "model.router_aux_loss=global")))


def test_a_signal_is_no_failure_of_a_family(tmp_path, monkeypatch):
    def stop(*options: object) -> None:
        raise SignalError(signal.SIGHUP)

    save_decoder("qwen3_moe", tmp_path)
    model = compose(tmp_path).model
    monkeypatch.setattr(decoder_check, "_traits", stop)
    with pytest.raises(SignalError, match="stopped") as caught:
        check_decoder(model)
    assert caught.value.exit_code == StoppedError.exit_code
