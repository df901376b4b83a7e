"""Tokens and trained positions, compared with transformers."""

from datetime import datetime

import pytest
import transformers.utils.chat_template_utils as theirs
from transformers import PreTrainedTokenizerFast

from tests.chats.families import FAMILIES, MARKED, say, template_of
from tests.chats.opened import DATE, opened

CHATS = (
    say("Hello there", "I am fine", "What is the weather?", "yes  no\n\nmaybe"),
    say(" \n hi ", "\n\n two lines\n", "ok", " and   spaces "),
    say("¿Qué? 🙂 日本", "日本語 ñ", "ünïcode", "naïve 🙂 café"),
    say("say <|im_end|> </s> <s>[INST]", "there <end_of_turn> <|end|> it is"),
)


class _Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.strptime(DATE, "%Y-%m-%d")


@pytest.fixture(autouse=True)
def _same_day(monkeypatch):
    monkeypatch.setattr(theirs, "datetime", _Clock)


def with_transformers(folder, messages, **kwargs):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, return_dict=True, tokenize=True, **kwargs)


def completed(mask, offsets):
    """Extend the mask of transformers to all tokens of a span's last character."""
    trained = list(mask)
    for at in range(1, len(trained)):
        trained[at] = trained[at] or int(trained[at - 1] and offsets[at] == offsets[at - 1])
    return trained


ROWS = [{"messages": messages} for messages in CHATS]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name, tmp_path):
    train = opened(tmp_path, name, ROWS, rewritten_turns="keep").train
    for number, messages in enumerate(CHATS):
        expected = with_transformers(tmp_path / "tokenizer", messages)
        assert train[number][0].tolist() == expected["input_ids"]


@pytest.mark.parametrize("name", MARKED)
def test_trained_positions_are_those_of_transformers_with_generation_blocks(name, tmp_path):
    train = opened(tmp_path, name, ROWS, template_of(name, marked=True)).train
    for number, messages in enumerate(CHATS):
        expected = with_transformers(
            tmp_path / "tokenizer", messages, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )  # fmt: skip
        tokens, trained = train[number]
        assert tokens.tolist() == expected["input_ids"]
        theirs = completed(expected["assistant_masks"], expected["offset_mapping"])
        assert trained.tolist() == theirs
        assert 0 < sum(theirs) < len(theirs)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_each_sample_of_a_rewritten_chat_is_the_conversation_up_to_there(name, tmp_path):
    messages = CHATS[0]
    data = opened(tmp_path, name, [{"messages": messages}])
    assert len(data.train) == 2
    for number, count in enumerate((2, 4)):
        expected = with_transformers(tmp_path / "tokenizer", messages[:count])["input_ids"]
        assert data.train[number][0].tolist() == expected


def test_all_tokens_of_a_last_character_are_trained_on(tmp_path):
    messages = say("hi", "ok 🙂")
    marked = (
        "{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}"
    )
    data = opened(tmp_path, "chatml", [{"messages": messages}], marked)
    theirs = with_transformers(tmp_path / "tokenizer", messages, return_assistant_tokens_mask=True)
    ours, masks = data.train.loss_mask.tolist(), theirs["assistant_masks"]
    missed = [at for at, (one, two) in enumerate(zip(ours, masks, strict=True)) if one != two]
    assert (missed, ours[-4:]) == ([len(ours) - 3, len(ours) - 2, len(ours) - 1], [True] * 4)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama32", "mistral_v3"])
def test_tool_calls_are_written_as_transformers_writes_them(name, tmp_path):
    function = {"name": "weather", "arguments": {"city": "Zürich <3", "days": 2}}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    messages = [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "It is good"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"a": [1, 2]}}}]
    data = opened(tmp_path, name, [{"messages": messages, "tools": tools}], rewritten_turns="keep")
    expected = with_transformers(tmp_path / "tokenizer", messages, tools=tools)["input_ids"]
    assert data.train.tokens.tolist() == expected
