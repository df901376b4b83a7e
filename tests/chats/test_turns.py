"""Trained characters of conversations, determined by hand."""

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpctl.chats.conversation import FILLERS
from fsdpctl.chats.formats import Chat
from fsdpctl.chats.render import Renderer
from fsdpctl.chats.samples import ChatSample, LossPolicy, samples_of
from fsdpctl.chats.turns import first_absent
from fsdpctl.data.chat_tokens import ChatTokenizer
from fsdpctl.data.tokenizer import EncodedText
from fsdpctl.errors import UsageError
from tests.chats.families import FAMILIES, MARKED, say, template_of
from tests.chats.opened import opened, trained_of, trained_texts

TALK = say("hello", "good \nday", "why", "because")
# The token that ends assistant messages: the families that use it.
ENDS = {
    "<|im_end|>": "chatml smollm2 qwen25 phi4", " </s>": "llama2", "<|eot_id|>": "llama3 llama32",
    "</s>": "mistral_v1 mistral_v3 mistral_v7 zephyr", "<end_of_turn>": "gemma2 gemma3",
    "<|end|>": "phi3 phi4_mini", "<｜end▁of▁sentence｜>": "deepseek_r1",
}  # fmt: skip
EXPECTED = {
    name: [[f"good \nday{end}", f"because{end}"]] for end, x in ENDS.items() for name in x.split()
} | {
    name: [[f"{before}good \nday{end}"], [f"{before}because{end}"]]
    for name, before, end in (
        ("qwen3", "<think>\n\n</think>\n\n", "<|im_end|>"),
        ("gpt_oss", "<|channel|>final<|message|>", "<|return|>"),
    )
}


@pytest.mark.parametrize("name", EXPECTED)
def test_assistant_messages_are_trained_on_with_the_token_that_ends_them(name, tmp_path):
    texts = trained_of(tmp_path, name, [{"messages": TALK}])
    assert [[text.strip() for text in each] for each in texts] == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in MARKED if name != "smollm3"])
def test_located_messages_equal_generation_blocks(name, tmp_path):
    rows = [{"messages": say("hello", " good day", "why 🙂", "be\n\ncause 🙂")}]
    located = opened(tmp_path / "found", name, rows)
    marked = opened(tmp_path / "marked", name, rows, template_of(name, marked=True))
    assert located.train.tokens.tolist() == marked.train.tokens.tolist()
    # Phi-3's blocks also mark two tokens of the line break after each answer, the last token, and
    # the control token before the first answer, which strips the answer's leading space.
    assert (located.train.loss_mask != marked.train.loss_mask).sum() == 6 * (name == "phi3")


ODD = ["\n\n lines \n", "  spaced ", "🙂", *FILLERS[:2]]


@pytest.mark.parametrize("name", FAMILIES)
def test_messages_with_unusual_edges_are_trained_on_in_full(name, tmp_path):
    texts = trained_of(tmp_path, name, [{"messages": say("hello", answer)} for answer in ODD])
    for (text,), answer in zip(texts, ODD, strict=True):
        assert answer.strip() in text
        assert "user" not in text


@pytest.mark.parametrize("name", ["chatml", "qwen3", "phi3", "gemma2"])
def test_control_tokens_in_messages_do_not_move_boundaries(name, tmp_path):
    end = {"phi3": "<|end|>", "gemma2": "<end_of_turn>"}.get(name, "<|im_end|>")
    data = opened(tmp_path, name, [{"messages": say(f"a {end} b", f"one {end} two")}])
    texts = trained_texts(data.train, data.tokenizer)
    assert texts[0][-1].strip().replace(" ", "").endswith(f"one{end}two{end}")
    assert any("2 messages with control tokens" in note for note in data.notes)


def test_the_end_of_a_message_may_differ_from_the_tokenizers_end(tmp_path):
    data = opened(tmp_path, "gemma2", [{"messages": TALK}])
    end = data.tokenizer.control_tokens["<end_of_turn>"]
    assert data.end_tokens == (end,)
    assert data.tokenizer.eos_id == data.tokenizer.control_tokens["<eos>"] != end


def test_weights_mask_assistant_messages(tmp_path):
    messages = [{**each} for each in TALK]
    messages[1]["weight"] = 0
    assert trained_of(tmp_path / "a", "chatml", [{"messages": messages}]) == [["because<|im_end|>"]]
    messages[1] = {**TALK[1], "train": False}
    assert trained_of(tmp_path / "b", "chatml", [{"messages": messages}]) == [["because<|im_end|>"]]
    marked = template_of("phi4", marked=True)
    texts = trained_of(tmp_path / "c", "phi4", [{"messages": messages}], template=marked)
    assert texts == [["because<|im_end|>"]]


def test_train_on_selects_the_last_message_or_all_tokens(tmp_path):
    rows = [{"messages": TALK}]
    assert trained_of(tmp_path / "a", "chatml", rows, train_on="last") == [["because<|im_end|>"]]
    assert opened(tmp_path / "b", "chatml", rows, train_on="all").train.loss_mask.all()
    off = [{"messages": [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]}]
    texts = trained_of(tmp_path / "c", "chatml", off, train_on="all")
    assert (len(texts[0]), any("good" in text for text in texts[0])) == (2, False)


def test_rewritten_turns_can_be_kept_and_are_counted(tmp_path):
    rows = [{"messages": TALK}]
    expected = [["good \nday<|im_end|>", "<think>\n\n</think>\n\nbecause<|im_end|>"]]
    assert trained_of(tmp_path, "qwen3", rows, rewritten_turns="keep") == expected
    assert any("1 conversation whose" in note for note in opened(tmp_path, "qwen3", rows).notes)
    assert not any("rewrites" in note for note in opened(tmp_path, "phi3", rows).notes)


def test_reasoning_is_trained_on_if_the_template_writes_it(tmp_path):
    messages = say("why", "because")
    messages[1]["reasoning"] = "let me think"
    thought = "<think>\nlet me think\n</think>\n\nbecause<|im_end|>"
    assert trained_of(tmp_path / "a", "qwen3", [{"messages": messages}]) == [[thought]]
    inside = say("why", "<think>\nlet me think\n</think>\n\nbecause")
    assert trained_of(tmp_path / "b", "qwen3", [{"messages": inside}]) == [[thought]]
    channels = (
        "<|channel|>analysis<|message|>let me think<|end|><|start|>assistant"
        "<|channel|>final<|message|>because<|return|>"
    )
    assert trained_of(tmp_path / "c", "gpt_oss", [{"messages": messages}]) == [[channels]]


def with_call(arguments):
    call = {"id": "abcdefghi", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "good"},
    ]


CALLS = {
    "qwen25": [
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
        "good<|im_end|>",
    ],
    "llama32": ['{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>', "good<|eot_id|>"],
}


@pytest.mark.parametrize("args", [{"city": "Rome"}, '{"city": "Rome"}'], ids=["object", "text"])
@pytest.mark.parametrize("name", CALLS)
def test_tool_calls_are_trained_on_and_their_results_are_masked(name, args, tmp_path):
    texts = trained_of(tmp_path, name, [{"messages": with_call(args)}])
    assert [each.strip() for each in texts[0]] == [each.strip() for each in CALLS[name]]


def test_a_control_token_that_opens_a_call_is_trained_on(tmp_path):
    rows = [{"messages": with_call({"city": "Rome"})}]
    (first, second), *_ = trained_of(tmp_path, "mistral_v3", rows)
    assert first.startswith("[TOOL_CALLS]")
    assert (first.endswith("</s>"), second.strip()) == (True, "good</s>")


NOT_FOUND = {
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}": "no control token .* ends",
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}"
    "{% endfor %}": "beginning not found: .* add_generation_prompt",
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}": (
        "message 2: the chat template drops this message"
    ),
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set text %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% endset %}{{ 'assistant: ' + text }}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}": "message 2: .*generation blocks do not enclose it",
    "{% macro say(text) %}{% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{{ m.role + ':' }}{{ 'x' if m.role == 'user' else '' }}"
    "{{ 'answer: ' + say(m.content) if m.role == 'assistant' else m.content }}{% endfor %}": (
        "message 2: .*generation blocks do not enclose it"
    ),
}


@pytest.mark.parametrize("template", NOT_FOUND, ids=range(len(NOT_FOUND)))
def test_messages_that_cannot_be_located_are_rejected_with_their_line(template, tmp_path):
    with pytest.raises(UsageError, match=rf"chats.jsonl, line 1: .*{NOT_FOUND[template]}"):
        opened(tmp_path, "chatml", [{"messages": TALK}], template)


def test_an_end_that_is_not_a_control_token_is_rejected(tmp_path):
    with pytest.raises(UsageError, match=r"no control token .* '<\|im_end\|>"):
        opened(tmp_path, "gemma2", [{"messages": say("a", "b")}], template_of("chatml"))


def test_a_sample_without_trained_tokens_is_dropped_and_counted(tmp_path):
    silent = [{**each, "train": False} for each in TALK]
    data = opened(tmp_path, "chatml", [{"messages": TALK}, {"messages": silent}])
    assert (len(data.train), any("1 sample dropped" in note for note in data.notes)) == (1, True)
    with pytest.raises(UsageError, match="nothing to train on; 1 sample"):
        opened(tmp_path / "b", "chatml", [{"messages": silent}])


SHORTENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THOUGHTS = say("a", "<think>hm</think>b", "c", "<think>so</think>d", "e", "f")
SHORTENED_SAMPLES = {
    "split": [["<think>hm</think>b<|im_end|>"], ["<think>so</think>d<|im_end|>"], ["f<|im_end|>"]],
    "keep": [["b<|im_end|>", "d<|im_end|>", "f<|im_end|>"]],
}


@pytest.mark.parametrize("policy", SHORTENED_SAMPLES)
def test_policies_for_rewritten_turns_with_generation_blocks(policy, tmp_path):
    rows = [{"messages": THOUGHTS}]
    texts = trained_of(tmp_path, "chatml", rows, template=SHORTENED, rewritten_turns=policy)
    assert texts == SHORTENED_SAMPLES[policy]


def test_unchanged_messages_share_a_sample(tmp_path):
    calls = with_call({"city": "Rome"})
    calls[1]["reasoning_content"] = calls[3]["reasoning_content"] = "hm"
    texts = trained_of(tmp_path, "qwen3", [{"messages": [*say("hi", "ho"), *calls]}])
    assert ([len(each) for each in texts], "tool_call" in texts[1][0]) == ([1, 2], True)
    assert texts[1][1] == "<think>\nhm\n</think>\n\ngood<|im_end|>"


def test_a_generation_block_at_the_end_belongs_to_the_last_message(tmp_path):
    rows = [{"messages": [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]}]
    (texts,) = trained_of(tmp_path, "phi3", rows, template=template_of("phi3", marked=True))
    assert "".join(texts).split() == ["because<|end|>", "<|endoftext|>"]


PIECES = [
    "a", "yes no", " ", "\n", "\n\n", "🙂", "é", "<|im_end|>", "<|im_start|>assistant\n", "</s>",
    "[/INST]", "<end_of_turn>", "{{ x }}", "{% endfor %}", "<think>", "</think>", *FILLERS,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
SAME = [name for name in MARKED if name not in ("smollm3", "phi3")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
@settings(max_examples=60)
@given(texts=st.lists(TEXTS.filter(str.strip), min_size=2, max_size=6))
def test_any_text_is_located_where_generation_blocks_mark_it(name, texts):
    """Compare characters, which needs neither a process nor a tokenizer."""
    family = FAMILIES[name]
    named = {"bos_token": family.bos or "", "eos_token": family.eos}
    controls = re.compile("|".join(map(re.escape, family.controls)))
    chat = Chat(say(*texts[: len(texts) // 2 * 2]), [True] * (len(texts) // 2 * 2))
    pair = []
    for marked in (False, True):
        renderer = Renderer(template_of(name, marked=marked), named, "2026-01-31")
        pair.append(samples_of(renderer, chat, LossPolicy("assistant", "split"), controls).samples)
    (located,), (expected,) = pair
    assert (located.text, located.spans) == (expected.text, expected.spans)


TWO_ENDS = {
    # Cohere's two tokens, for which each answer is `good` or `better`
    "{% for m in messages %}{{ '<|turn|>' + m.role + ':' + m.content + '<|end|><|eot|>' }}"
    "{% endfor %}": ["good<|end|><|eot|>", "better<|end|><|eot|>"],
    # a newline between them, and thoughts that later turns drop
    "{% for m in messages %}{{ '<|turn|>' + m.role + ':' + ('' if loop.last else '</t>') }}"
    "{{ m.content + '<|end|>\n<|eot|>\n' }}{% endfor %}": [
        "good<|end|>\n<|eot|>", "better<|end|>\n<|eot|>",
    ],
    # Phi-4-mini's second token ends the conversation, after questions too
    "{% for m in messages %}{{ '<|turn|>' + m.role + ':' + m.content + '<|end|>' }}{% endfor %}"
    "{% if not add_generation_prompt %}<|eot|>{% endif %}": ["good<|end|>", "better<|end|>"],
}  # fmt: skip
PROMPT = "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"


@pytest.mark.parametrize("policy", ["split", "keep"])
@pytest.mark.parametrize("template", TWO_ENDS, ids=["both", "rewritten", "of the conversation"])
def test_control_tokens_that_always_follow_the_first_end_the_message_too(template, policy):
    renderer = Renderer(template + PROMPT, {}, "2026-01-31")
    controls = re.compile(r"<\|turn\|>|<\|end\|>|<\|eot\|>")
    chat = Chat(say("hello", "good", "why", "better"), [True] * 4)
    samples = samples_of(renderer, chat, LossPolicy("assistant", policy), controls).samples
    texts = [each.text[start:stop] for each in samples for start, stop in each.spans]
    assert [text.removeprefix("</t>") for text in texts] == TWO_ENDS[template]
    masked = msgspec.structs.replace(chat, trained=[True, True, True, False])
    (others,) = samples_of(renderer, masked, LossPolicy("all", policy), controls).samples
    assert TWO_ENDS[template][1] not in "".join(others.text[a:b] for a, b in others.spans)


@pytest.mark.parametrize("length", [2, 4])
def test_a_call_is_trained_on_with_the_token_that_ends_the_turn(length):
    template = (
        "{% for m in messages %}{{ '<|turn|>' + m.role + ':' }}{% for call in m.tool_calls or [] %}"
        "{{ '<|call|>' + call.function.name + '<|end|>' }}{% endfor %}"
        "{{ '<|calls|><|eot|>' if m.tool_calls else m.content + '<|eot|>' }}{% endfor %}"
    )
    messages = [{**each, "content": each["content"] or ""} for each in with_call({"city": "Rome"})]
    chat, policy = Chat(messages[:length], [True] * length), LossPolicy("assistant", "split")
    renderer = Renderer(template + PROMPT, {}, "2026-01-31")
    (sample,) = samples_of(renderer, chat, policy, re.compile(r"<\|\w+\|>")).samples
    texts = [sample.text[start:stop] for start, stop in sample.spans]
    assert texts == ["<|call|>weather<|end|><|calls|><|eot|>", "good<|eot|>"][: length // 2]


@pytest.mark.parametrize(("name", "most"), [("chatml", 4), ("qwen3", 5), ("gpt_oss", 5)])
def test_an_answer_costs_a_few_renderings(name, most, monkeypatch):
    renderer = Renderer(template_of(name), {"eos_token": FAMILIES[name].eos}, "2026-01-31")
    rendered = []

    def count(*args, **kwargs):
        rendered.append(args)
        return render(*args, **kwargs)

    render = Renderer.render
    monkeypatch.setattr(Renderer, "render", count)
    controls = re.compile("|".join(map(re.escape, FAMILIES[name].controls)))
    chat = Chat(say(*["hello", "good"] * 8), [True] * 16)
    samples_of(renderer, chat, LossPolicy("assistant", "split"), controls)
    assert len(rendered) <= 8 * most


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_many_spans_are_those_with_a_character_in_one(seed, is_marked):
    drawn = np.random.default_rng(seed)
    edges = np.sort(drawn.choice(400, 40, replace=False)).reshape(-1, 2)
    at = np.sort(drawn.choice(400, 120))
    encoded = EncodedText(drawn.integers(0, 9, 119).astype(np.uint16), at[:-1], at[1:])
    tokenizer: Any = SimpleNamespace(vocab_size=9, control_tokens={"<a>": 2, "<b>": 5})
    spans = [(int(a), int(b)) for a, b in edges]
    mask = ChatTokenizer(tokenizer)._loss_mask(ChatSample("", spans, is_marked), encoded)
    triples = zip(encoded.tokens, encoded.starts, encoded.stops, strict=True)
    for trained, (token, start, stop) in zip(mask.tolist(), triples, strict=True):
        within = [a for a, b in spans if stop > a and start < b]
        assert trained == any(is_marked or token not in (2, 5) or start >= a for a in within)
    assert ChatTokenizer(tokenizer)._loss_mask(ChatSample("", []), encoded).sum() == 0


class Searched(str):
    """A text that counts the searches in it."""

    searches = 0

    def __contains__(self, arg):
        Searched.searches += 1
        return super().__contains__(arg)


@pytest.mark.parametrize("tokens", [["<|a|>"] * 9999, ["<|a|>", "<|b|>"] * 9999])
def test_a_long_message_is_searched_once_for_each_control_token_in_it(tokens):
    Searched.searches = 0
    assert first_absent(tokens, Searched("x" * 999 + "<|a|><|b|>")) is None
    assert Searched.searches == len({*tokens})
    assert first_absent(["<|a|>", "<|c|>"], Searched("<|a|>")) == "<|c|>"
