"""Conversion of a byte-level BPE tokenizer to the metadata that llama.cpp reads."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from fsdpctl.data.tokenizer import FileTokenizer
from fsdpctl.data.tokenizer_files import CONFIG_JSON, NO_MERGES, TOKENIZER_JSON, VOCABULARIES
from fsdpctl.errors import UsageError
from fsdpctl.io.gguf_header import GGUF_TOKENIZER

if TYPE_CHECKING:
    import gguf

# llama.cpp's names of pre-tokenizers, in the order of preference, and the expressions by which they
# split, one after the other. transformers has those of some.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS: Mapping[str, Sequence[str]] = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    **dict.fromkeys(("llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "qwen35"), ()),
}
_IGNORE_MERGES = ("llama-bpe", "tekken")  # a piece that is a token is that token
_TEXTS = (
    "Hello, world! isn't it? WE'LL see; they'Re y'all's 'tis -- don't.",
    "1 12 123 1234 12345 1234567 3.14 1,000 x2 2x a1b22c ٣٤ ²½",
    "  two   three\t\ttabs \n\n\n new\r\n\r\n lines \n  end.\n\n  \n",
    "CamelCase snake_case HTTPServer2 été ÉCOLE naïve Straße Привет, мир Ελληνικά",
    "日本語のテスト。 中文，字符！ 한국어 ไทย नमस्ते שָׁלוֹם عَرَبِيّ",
    "if (x<=y) { a[i] += *p; } // ok?! ... --- == => $5 #1 @me a/b\\c `q`  ",
    "→ ✓ a→b 😀👍🏽 \u200b\u00a0\u3000x «q» “q” ‘q’ — … € ™ ﬁ Ａ１",
)


def write_tokenizer(writer: "gguf.GGUFWriter", files: Mapping[str, bytes], vocab_size: int) -> str:
    """Add a byte-level BPE tokenizer, made of `files` by name, to a GGUF file.

    Rows of the model's embedding without a token get placeholder tokens. Returns a note on it, if
    the file has no tokenizer or one that may differ, or an empty string.
    """
    why, saved, name = "the run's tokenizer is unknown", dict[str, bytes](), ""
    about: dict[str, Any] = {}
    if files.keys() & set(VOCABULARIES):
        saved = FileTokenizer("of the checkpoint", files).saved()  # with tokens of all files
        about = json.loads(saved.get(TOKENIZER_JSON, b"{}"))
        is_bytes = '"ByteLevel"' in json.dumps(about.get("pre_tokenizer"))
        why = "the run's tokenizer is not a byte-level BPE"
        if about.get("model", {}).get("type") == "BPE" and is_bytes:
            why = "llama.cpp does not have the pre-tokenizer of the run's tokenizer"
            name = _splitter(about)
    if not name:
        writer.add_tokenizer_model("none")
        return f"no tokenizer: {why}"
    saved |= {each: files[each] for each in (CONFIG_JSON,) if each in files}
    try:
        writer.add_tokenizer_pre(name)
        _add(writer, about, saved, vocab_size)
        writer.add_string(GGUF_TOKENIZER, saved[TOKENIZER_JSON].decode())
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{TOKENIZER_JSON}: unexpected contents: {error!r:.200}") from None
    rough = f"tokens of words beyond A to Z may differ: llama.cpp approximates {name}"
    return rough if name in ("tekken", "gpt-4o") else ""


def _add(writer: Any, about: Mapping[str, Any], files: Mapping[str, bytes], size: int) -> None:
    import gguf

    tokens, types = _tokens(about, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with tempfile.TemporaryDirectory() as folder:  # the library reads files
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    special.merges = special.merges or NO_MERGES
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _splitter(about: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a pre-tokenizer with the same tokens of some texts, or ""."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    plain = {**about, "post_processor": None, "truncation": None, "padding": None}
    theirs = Tokenizer.from_str(json.dumps(plain))
    ours = Tokenizer.from_str(json.dumps({**plain, "normalizer": None}))
    words = (decoders.ByteLevel().decode([each]) for each in about["model"]["vocab"])
    known = [each for each in words if "\ufffd" not in each]  # not a part of a character
    # llama.cpp does not compose characters, which changes nothing here.
    texts = [normalizers.NFC().normalize_str(f"{x} {x}{x}\n{x}9{x}'{x}") for x in known]
    made: dict[str, Any] = {}
    for name, splits in _SPLITS.items():
        steps = splits or [GGUF_PRE_TOKENIZER_SPLITS[name]]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made[name] = pre_tokenizers.Sequence(
            [*(pre_tokenizers.Split(Regex(each), "isolated") for each in steps), last]
        )
    pieces = _pieces(theirs.pre_tokenizer)
    for name in sorted(made, key=lambda each: _pieces(made[each]) != pieces):
        ours.pre_tokenizer = made[name]
        ours.model.ignore_merges = name in _IGNORE_MERGES
        if all(_ids(ours, each) == _ids(theirs, each) for each in (_TEXTS, texts)):
            return name
    return ""


def _pieces(made: Any) -> list[str]:
    return [piece for text in _TEXTS for piece, _ in made.pre_tokenize_str(text)]


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(list(texts))]


def _tokens(about: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    import gguf

    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    vocabulary: Mapping[str, int] = about["model"]["vocab"]
    known = {number: (text, gguf.TokenType.NORMAL) for text, number in vocabulary.items()}
    for each in about.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if each.get("special") else gguf.TokenType.USER_DEFINED
        known[each["id"]] = (each["content"], kind)
    for number in known.keys() & range(vocab_size):
        text, kind = known[number]
        tokens[number], types[number] = text, int(kind)
    return tokens, types
