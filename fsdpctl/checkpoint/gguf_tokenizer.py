"""Conversion of a byte-level BPE tokenizer to the metadata that llama.cpp reads."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpctl.data.tokenizer import FileTokenizer
from fsdpctl.data.tokenizer_files import CONFIG_JSON, TOKENIZER_JSON, VOCABULARIES
from fsdpctl.errors import UsageError

if TYPE_CHECKING:
    import gguf

# Names of pre-tokenizers that llama.cpp prefers, of those that split alike.
_PREFERRED = ("llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35")
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
    why, saved = "the run's tokenizer is unknown", dict[str, bytes]()
    about: dict[str, Any] = {}
    if files.keys() & set(VOCABULARIES):
        saved = FileTokenizer("of the checkpoint", files).saved()  # with tokens of all files
        about = json.loads(saved.get(TOKENIZER_JSON, b"{}"))
        why = _obstacle(about)
    if why:
        writer.add_tokenizer_model("none")
        return why
    saved |= {name: files[name] for name in (CONFIG_JSON,) if name in files}
    try:
        _add(writer, about, saved, vocab_size)
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
    writer.add_tokenizer_pre(_splitter(about) or "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with tempfile.TemporaryDirectory() as folder:  # the library reads files
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    special.merges = special.merges or _NO_MERGES
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _obstacle(about: Mapping[str, Any]) -> str:
    is_bpe = about.get("model", {}).get("type") == "BPE"
    if not is_bpe or not _finds(about.get("pre_tokenizer"), "ByteLevel"):
        return "the run's tokenizer is not a byte-level BPE"
    if about["model"]["merges"] and not _splitter(about):
        return "llama.cpp does not have the pre-tokenizer of the run's tokenizer"
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
    """Return llama.cpp's name of the pre-tokenizer; empty if it has none."""
    node = about.get("pre_tokenizer")
    if _finds(node, "Digits"):
        return "smollm"
    split = _finds(node, "Split")
    if split is None:
        byte_level = _finds(node, "ByteLevel") or {}
        return "gpt-2" if byte_level.get("use_regex", True) else ""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pattern = split["pattern"].get("Regex")
    names = [name for name, regex in GGUF_PRE_TOKENIZER_SPLITS.items() if regex == pattern]
    return next((name for name in _PREFERRED if name in names), "")


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
