"""A tokenizer.json as llama.cpp wants it."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.data.tokenizer import TOKENIZER_JSON
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import parse_json

if TYPE_CHECKING:
    import gguf

# What splits text before merges, by what tells it from the others in its regular expression.
_SPLITTERS = (
    ("\\p{N}{1,3}|", "llama-bpe"),
    ("\\p{L}+|\\p{N}|", "qwen2"),
)
# llama.cpp refuses a model without merges. This one makes no token, so bytes stay bytes.
_NO_MERGES = ["\u0100 \u0100"]


def write_tokenizer(writer: "gguf.GGUFWriter", files: Mapping[str, bytes], vocab_size: int) -> str:
    """Add a byte-level BPE tokenizer to a model; why there is none, or an empty string.

    Args:
        writer: of the GGUF file.
        files: the tokenizer's, and the model's config.json, by name.
        vocab_size: rows of the model's embedding; tokens without a text are filled in.
    """
    about = parse_json(files.get(TOKENIZER_JSON, b"{}"), dict[str, Any], TOKENIZER_JSON)
    why = "nobody knows what tokenizer made the run's tokens" if not about else _obstacle(about)
    if why:
        writer.add_tokenizer_model("none")
        return why
    for name, content in files.items():  # the library reads them without limits
        if name.endswith(".json"):
            parse_json(content, dict[str, Any], name)
    try:
        _add(writer, about, files, vocab_size)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{TOKENIZER_JSON}: not as expected: {error!r:.200}") from None
    return ""


def _add(
    writer: "gguf.GGUFWriter",
    about: Mapping[str, Any],
    files: Mapping[str, bytes],
    vocab_size: int,
) -> None:
    import gguf

    tokens, types = _tokens(about, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitter(about))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with tempfile.TemporaryDirectory() as folder:  # the library reads files
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    special.merges = special.merges or _NO_MERGES
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _obstacle(about: Mapping[str, Any]) -> str:
    model = about["model"]
    is_bpe = model.get("type", "BPE") == "BPE" and "merges" in model  # old files name no type
    if not is_bpe or not _finds(about.get("pre_tokenizer"), "ByteLevel"):
        return "its tokenizer is no byte-level BPE"
    return ""


def _finds(node: object, kind: str) -> Mapping[str, Any] | None:
    """The pre-tokenizer of a type, in a tree of them."""
    if not isinstance(node, dict):
        return None
    if node.get("type") == kind:
        return node
    inner = (_finds(each, kind) for each in node.get("pretokenizers", ()))
    return next((each for each in inner if each is not None), None)


def _splitter(about: Mapping[str, Any]) -> str:
    """llama.cpp's name for how text is split before merges."""
    node = about.get("pre_tokenizer")
    if _finds(node, "Digits"):
        return "smollm"
    split = _finds(node, "Split")
    pattern = str(split["pattern"].get("Regex", "")) if split else ""
    return next((name for sign, name in _SPLITTERS if sign in pattern), "gpt-2")


def _tokens(about: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    import gguf

    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    known = {number: (text, gguf.TokenType.NORMAL) for text, number in _vocabulary(about)}
    for each in about.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if each.get("special") else gguf.TokenType.USER_DEFINED
        known[each["id"]] = (each["content"], kind)
    for number in known.keys() & range(vocab_size):
        text, kind = known[number]
        tokens[number], types[number] = text, int(kind)
    return tokens, types


def _vocabulary(about: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    entries: Mapping[str, int] = about["model"]["vocab"]
    return entries.items()
