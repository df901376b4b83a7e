"""Formats of conversations, and lines that can't be trained on."""

import gzip
import json

import pytest

from fsdpctl.chats.formats import PlainText
from fsdpctl.chats.rows import read_rows
from fsdpctl.errors import UsageError
from tests.chats.families import say
from tests.chats.opened import opened, trained_of

CHAT = say("hello", "good day", system="be kind")


def rows_of(file):
    return [line.content for line, _ in read_rows(str(file))[1]]


def test_assistant_messages_in_a_prompt_are_masked(tmp_path):
    rows = [{"prompt": say("a", "b", "c"), "completion": say("x", "d")[1:]}]
    assert trained_of(tmp_path, "chatml", rows) == [["d<|im_end|>"]]


def test_texts_are_trained_with_the_tokenizers_end_and_need_no_template(tmp_path):
    rows = [{"prompt": "hello there", "completion": " good day"}]
    data = opened(tmp_path / "a", "llama3", rows, template="")
    text = data.tokenizer.decode(data.train.tokens.tolist(), skip_special_tokens=False)
    assert text == "hello there good day<|eot_id|>"
    assert data.train.loss_mask.tolist()[-1]
    assert trained_of(tmp_path / "b", "llama3", rows) == [[" good day<|eot_id|>"]]
    assert trained_of(tmp_path / "c", "llama3", [{"text": "yes"}]) == [["yes<|eot_id|>"]]
    assert data.template is None


def test_parts_are_joined_if_the_template_does_not_support_them(tmp_path):
    parts = [{"type": "text", "text": "good"}, {"type": "text", "text": " day"}]
    rows = [{"messages": [*say("x"), {"role": "assistant", "content": parts}]}]
    assert trained_of(tmp_path / "a", "gemma3", rows) == [["goodday<end_of_turn>"]]
    for name in ("chatml", "qwen25"):
        assert trained_of(tmp_path / name, name, rows) == [["good day<|im_end|>"]]


def test_gzip_byte_order_marks_and_crlf_are_supported(tmp_path):
    lines = json.dumps({"text": "a"}).encode() + b"\r\n\r\n" + json.dumps({"text": "b"}).encode()
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + lines)
    packed.write_bytes(gzip.compress(lines, mtime=0))
    assert rows_of(plain) == rows_of(packed) == [PlainText("a"), PlainText("b")]
    assert [line.location for line, _ in read_rows(str(plain))[1]] == [
        f"{plain}, line 1", f"{plain}, line 3",
    ]  # fmt: skip


GOOD = json.dumps({"messages": CHAT}).encode()
EXPECTED = r"expected one JSON object per line \(.jsonl\), a JSON array of objects, or .parquet"
BAD = {
    b'{"messages": [': "not JSON: .*column",
    b'{"text": "x"}': "messages: required, as in the file's first row",
    b"[1, 2]": f"Expected .*; {EXPECTED}", b"a,b": f"not JSON: .*; {EXPECTED}",
    b"{": f"not JSON: .*; {EXPECTED}",
    b'{"messages": [{"role": "user", "content": "\xff"}]}': "not UTF-8: .* at byte 44",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_errors_name_the_file_and_the_line(line, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(GOOD + b"\n\n" + line + b"\n" + GOOD + b"\n")
    with pytest.raises(UsageError, match=f"chats.jsonl, line 3: .*(?:{BAD[line]})") as caught:
        rows_of(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# The text in axolotl's documentation of `type: alpaca`: axolotl tokenizes the answer separately.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{asked}\n\n### Response:\n",
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{asked}\n\n### Input:\n{added}\n\n### Response:\n",
)


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma3"])
@pytest.mark.parametrize("added", ["", None, "good friends"])
def test_rows_of_alpaca_have_the_tokens_that_axolotl_makes(tmp_path, family, added):
    rows = [{"instruction": "say", "input": added, "output": "good day"}]
    data = opened(tmp_path, family, rows, prompt="alpaca")
    tokenizer = data.tokenizer.hf
    prompt = ALPACA[bool(added)].format(asked="say", added=added)
    before, answer = tokenizer(prompt)["input_ids"], tokenizer("good day", add_special_tokens=False)
    expected = [*before, *answer["input_ids"], tokenizer.eos_token_id]
    assert data.train.tokens.tolist() == expected
    trained = [False] * len(before) + [True] * (len(expected) - len(before))
    assert data.train.loss_mask.tolist() == trained


def test_only_rows_with_an_instruction_are_written_as_alpaca(tmp_path):
    rows = [{"messages": say("hello", "good day")}]
    assert trained_of(tmp_path, "chatml", rows, prompt="alpaca") == [["good day<|im_end|>"]]
    empty = {"instruction": "say", "output": ""}
    answered = {"instruction": "say", "output": "good day"}
    assert len(opened(tmp_path / "empty", "chatml", [empty, answered], prompt="alpaca").train) == 1
    bad = {"instruction": "say", "output": "good day", "history": [["a", "b"]]}
    with pytest.raises(UsageError, match=r"line 1: history: only valid with data.prompt=template"):
        opened(tmp_path, "chatml", [bad], prompt="alpaca")


# The examples of the data set formats in TRL's documentation.
SKY = [
    {"role": "user", "content": "What color is the sky?"},
    {"role": "assistant", "content": "It is blue."},
]


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_rows_of_trls_documentation_have_the_tokens_that_trl_makes(tmp_path, family):
    text = opened(tmp_path / "text", family, [{"text": "The sky is blue."}], train_on="all")
    tokenizer = text.tokenizer.hf
    whole, end = tokenizer("The sky is blue.")["input_ids"], tokenizer.eos_token_id
    assert text.train.tokens.tolist() == [*whole, end]
    pair_set = opened(tmp_path / "pair", family, [{"prompt": "The sky is", "completion": " blue."}])
    num_prompt_tokens = len(tokenizer("The sky is")["input_ids"])
    assert pair_set.train.tokens.tolist() == [*whole, end]
    count = len(whole) + 1 - num_prompt_tokens
    assert pair_set.train.loss_mask.tolist() == [False] * num_prompt_tokens + [True] * count
    chat = opened(tmp_path / "chat", family, [{"messages": SKY}], train_on="all")
    expected = tokenizer.apply_chat_template(SKY, return_dict=False)
    assert (chat.train.tokens.tolist(), all(chat.train.loss_mask.tolist()[1:])) == (expected, True)
