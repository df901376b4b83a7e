"""Conversion of tokenizer.json to the metadata that llama.cpp reads."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.data.tokenizer import TOKENIZER_JSON
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import parse_json

if TYPE_CHECKING:
    import gguf

# llama.cpp's names of pre-tokenizers, by a part of their regular expression that identifies them.
_SPLITTERS = (
    ("\\p{N}{1,3}|", "llama-bpe"),
    ("\\p{L}+|\\p{N}|", "qwen2"),
)
# llama.cpp rejects a model without merges. This merge produces no token, so bytes stay bytes.
_NO_MERGES = ["\u0100 \u0100"]


def write_tokenizer(writer: "gguf.GGUFWriter", files: Mapping[str, bytes], vocab_size: int) -> str:
    """Add a byte-level BPE tokenizer, made of `files` by name, to a GGUF file.

    Rows of the model's embedding without a token get placeholder tokens.

    Returns:
        Why the file has no tokenizer, or an empty string.

    Raises:
        UsageError: If the tokenizer's files are invalid.
    """
    about = parse_json(files.get(TOKENIZER_JSON, b"{}"), dict[str, Any], TOKENIZER_JSON)
    why = "the run's tokenizer is unknown" if not about else _obstacle(about)
    if why:
        writer.add_tokenizer_model("none")
        return why
    for name, content in files.items():  # the library sets no limits itself
        if name.endswith(".json"):
            parse_json(content, dict[str, Any], name)
    try:
        _add(writer, about, files, vocab_size)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{TOKENIZER_JSON}: unexpected contents: {error!r:.200}") from None
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
        return "the run's tokenizer is not a byte-level BPE"
    return ""


def _finds(node: object, kind: str) -> Mapping[str, Any] | None:
    """Return the first pre-tokenizer of a type in a tree of pre-tokenizers."""
    if not isinstance(node, dict):
        return None
    if node.get("type") == kind:
        return node
    inner = (_finds(each, kind) for each in node.get("pretokenizers", ()))
    return next((each for each in inner if each is not None), None)


def _splitter(about: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer."""
    node = about.get("pre_tokenizer")
    if _finds(node, "Digits"):
        return "smollm"
    split = _finds(node, "Split")
    pattern = str(split["pattern"].get("Regex", "")) if split else ""
    return next((name for part, name in _SPLITTERS if part in pattern), "gpt-2")


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
