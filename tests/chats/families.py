"""Chat templates of published models, and small tokenizers with their control tokens.

In templates/, ⟪ and ⟫ enclose the generation blocks of the marked version.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

TEMPLATES = Path(__file__).parent / "templates"
_TEXTS = [
    "Hello there, how are you today? I am fine, thank you. What is the weather like in Paris?",
    "user assistant system model You are a helpful AI assistant. Today is a good day.\n\n",
    "the quick brown fox jumps over the lazy dog, and 12345 more; yes no maybe ok",
] * 4


@dataclass(frozen=True)
class Family:
    """The special tokens of a model's tokenizer."""

    controls: tuple[str, ...]
    bos: str | None
    eos: str
    is_metaspace: bool = False
    swallows: tuple[str, ...] = ()  # control tokens that strip the space after them


_END_OF_TEXT = "<|endoftext|>"
_CHATML = ("<|im_start|>", "<|im_end|>", _END_OF_TEXT)
_LLAMA3 = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
)  # fmt: skip
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_PHI = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")

FAMILIES = {
    "chatml": Family(_CHATML, None, "<|im_end|>"),
    "smollm2": Family(_CHATML, "<|im_start|>", "<|im_end|>"),
    "smollm3": Family(_CHATML, None, "<|im_end|>"),
    "llama2": Family(("<s>", "</s>"), "<s>", "</s>", is_metaspace=True),
    "llama3": Family(_LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "llama32": Family(_LLAMA3, "<|begin_of_text|>", "<|end_of_text|>"),
    "qwen25": Family(_CHATML, None, _END_OF_TEXT),
    "qwen3": Family(_CHATML, None, "<|im_end|>"),
    "mistral_v1": Family(("<s>", "</s>"), "<s>", "</s>", is_metaspace=True),
    "mistral_v3": Family(_MISTRAL, "<s>", "</s>", is_metaspace=True),
    "mistral_v7": Family(_MISTRAL, "<s>", "</s>"),
    "gemma2": Family(_GEMMA, "<bos>", "<eos>"),
    "gemma3": Family(_GEMMA, "<bos>", "<eos>"),
    "phi3": Family(("<s>", _END_OF_TEXT, *_PHI), "<s>", _END_OF_TEXT, True, ("<|assistant|>",)),
    "phi4": Family((*_CHATML, "<|im_sep|>"), _END_OF_TEXT, "<|im_end|>"),
    "phi4_mini": Family((_END_OF_TEXT, *_PHI), _END_OF_TEXT, _END_OF_TEXT),
    "zephyr": Family(("<s>", "</s>"), "<s>", "</s>", is_metaspace=True),
    "deepseek_r1": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "gpt_oss": Family(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", _END_OF_TEXT),
        _END_OF_TEXT,
        "<|return|>",
    ),
}
# Edits that mark answers in templates that render all roles alike: the replaced text, the text
# before the answer, the answer, the text after it.
_SPLIT = {
    "chatml": (
        r"{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
        r"{{'<|im_start|>' + message['role'] + '\n'}}",
        "{{message['content'] + '<|im_end|>'}}",
        r"{{'\n'}}",
    ),
    "llama3": (
        "{{ content }}",
        "{{ content.split('\n\n')[0] + '\n\n' }}",
        "{{ message['content'] | trim + '<|eot_id|>' }}",
        "",
    ),
    "qwen25": (
        r"{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}",
        r"{{- '<|im_start|>' + message.role + '\n' }}",
        "{{- message.content + '<|im_end|>' }}",
        r"{{- '\n' }}",
    ),
    "gemma2": (
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
        "{{ '<start_of_turn>' + role + '\n' }}",
        "{{ message['content'] | trim + '<end_of_turn>' }}",
        "{{ '\n' }}",
    ),
}
MARKED = ("llama2", "mistral_v1", "mistral_v7", "phi3", "phi4", "zephyr", "smollm3", *_SPLIT)


def template_of(name: str, *, marked: bool = False) -> str:
    """Return the template as published, or with generation blocks."""
    text = (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")
    if not marked:
        return text.replace("⟪", "").replace("⟫", "")
    if name in _SPLIT:
        old, head, body, tail = _SPLIT[name]
        assert old in text
        answer = f"{{% generation %}}{body}{{% endgeneration %}}"
        choice = f"{{% if message['role'] == 'assistant' %}}{answer}{{% else %}}{body}{{% endif %}}"
        return text.replace(old, head + choice + tail)
    assert "⟪" in text or "generation" in text
    text = text.replace("⟫\n", "⟫\n\n")  # a block takes one line break
    return text.replace("⟪", "{% generation %}").replace("⟫", "{% endgeneration %}")


@cache
def _trained(is_metaspace: bool) -> str:
    tokenizer = Tokenizer(BPE(byte_fallback=is_metaspace, unk_token="<unk>"))
    alphabet: list[str] = []
    if is_metaspace:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if is_metaspace else []
    trainer = BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *fallback], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if is_metaspace:
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ])  # fmt: skip
    else:
        tokenizer.decoder = decoders.ByteLevel()
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []  # bytes are not control tokens
    return json.dumps(content)


def write_tokenizer(folder: Path, name: str, template: str | None = None) -> Path:
    """Write the family's tokenizer with its chat template, or with `template` ("": none)."""
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(_trained(family.is_metaspace))
    tokenizer.add_special_tokens([
        AddedToken(each, special=True, normalized=False, rstrip=each in family.swallows)
        for each in family.controls
    ])  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos,
        "chat_template": template_of(name) if template is None else template,
    }  # fmt: skip
    if template == "":
        del options["chat_template"]
    if family.bos is not None:
        options["bos_token"] = family.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def say(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation of alternating user and assistant messages."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    rest = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    return [*first, *rest]


def write_lines(file: Path, rows: list[Any]) -> Path:
    """Write rows as JSON Lines."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file
