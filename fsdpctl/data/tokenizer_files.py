"""The files of a tokenizer, with limits, and their opening by transformers.

Note: why transformers reads a copy. The directory may be hostile or change meanwhile. The copy
contains the regular files that were read, and nothing else: no code, no link, and of config.json
the keys that select the tokenizer's class.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as JsonTokenizer

from fsdpctl.errors import FsdpctlError, SignalError, UsageError
from fsdpctl.io.files import plain_name, read_regular
from fsdpctl.io.untrusted import MIB, parse_json

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE, TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
TEMPLATES = "additional_chat_templates"  # a directory
VOCABULARIES = (
    TOKENIZER_CONFIG, TOKENIZER_JSON, "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "spm.model", "sentencepiece.model", "spm_char.model", "tekken.json",
    "tiktoken.model", "bpe.codes", "dict.txt", "source.spm", "prophetnet.tokenizer",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARIES, "special_tokens_map.json", "added_tokens.json", "merges.txt", "normalizer.json",
    "target.spm", "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json",
    "emoji.json", "word_shape.json", "word_pronunciation.json", "byte_maps.json", TEMPLATE_FILE,
    TEMPLATE_JSON,
)  # fmt: skip
MOST_ASSET_BYTES = 256 * MIB  # per file; the largest known tokenizer.json has 35
_MOST_TEMPLATES = 64
# Of a tokenizer.json. Published ones have 12 normalizers, and 2,000 bytes of post-processors.
_MOST_NODES, _MOST_CONTENT, _MOST_POST_PROCESSOR = 256, 1024, 16 << 10
_MOST_GROWTH = 64  # characters for one; Unicode's own normalization makes 18 of one
_MOST_COMPARED = 10**8  # pairs of special tokens, which take seconds
CONFIG_JSON = "config.json"
_OF_THE_CLASS = ("model_type", "tokenizer_class", "transformers_version", "model_name")
_NOT_A_SETTING = ("tokenizer_object", "gguf_file", "fast_tokenizer_files", "init_inputs")
_TEMPLATE_PIECE = f"{TEMPLATES}/"
_NOTHING: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
}  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Return whether a directory has a file that describes a tokenizer."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def read_files(folder: Path, *others: str) -> dict[str, bytes]:
    """Read the files of a tokenizer that exist, and `others`, by name relative to `folder`.

    Raises:
        UsageError: If a file is too large, not regular, or links out of the directory.
    """
    names, more = [*TOKENIZER_FILES, *others], folder / TEMPLATES
    if more.is_symlink():
        raise UsageError(f"{more}: expected a directory, got a link")
    if more.is_dir():
        found = sorted(each.name for each in more.iterdir() if each.name.endswith(".jinja"))
        if len(found) > _MOST_TEMPLATES:
            raise UsageError(f"{more}: expected at most {_MOST_TEMPLATES} templates")
        names += (asset_name(f"{TEMPLATES}/{name}", str(folder), UsageError) for name in found)
    return {
        name: read_regular(folder / name, MIB if name.endswith(".jinja") else MOST_ASSET_BYTES)
        for name in names
        if os.path.lexists(folder / name)
    }


def asset_name(name: str, where: str, refusal: type[FsdpctlError]) -> str:
    """Return `name` if it can be that of a file with the weights: of data, in this directory.

    Raises:
        FsdpctlError: Of type `refusal`, if it isn't.
    """
    kinds = r".*\.(jinja|json|model|txt|spm|codes|tokenizer)"
    if name.startswith(_TEMPLATE_PIECE):
        plain_name(name.removeprefix(_TEMPLATE_PIECE), r".*\.jinja", where, refusal)
        return name
    return plain_name(name, kinds, where, refusal)


def load_tokenizer(name: str, files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer that `AutoTokenizer` makes of `files`.

    Args:
        name: The location of the tokenizer, for messages.
        files: The contents by name, of which config.json and those of tokenizers matter.

    Raises:
        UsageError: If a file is damaged or exceeds a limit, or if transformers can't load it.
    """
    where = f"tokenizer {name}"
    copied = _copied(files, where)
    with guarded(where), tempfile.TemporaryDirectory(prefix="fsdpctl-") as folder:
        for each, content in copied.items():
            path = Path(folder, each)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        from transformers import AutoTokenizer  # takes a second

        try:
            auto = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            # Some classes make a tokenizer without any token if their files are missing.
            if auto.vocab_files_names and not files.keys() & set(VOCABULARIES[1:]):
                raise ValueError
        except Exception as error:
            raise _refusal(name, str(error).replace(folder, name), files) from None
    return auto


def _refusal(name: str, text: str, files: Mapping[str, bytes]) -> UsageError:
    if "trust_remote_code" in text:
        problem = "requires code of its directory (auto_map), which fsdpctl does not run"
    elif TOKENIZER_JSON in files:
        problem = f"transformers: {' '.join(text.split()):.200}"
    else:
        problem = (
            f"{TOKENIZER_JSON} not found, and transformers cannot load the other files; create it "
            "with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return UsageError(f"tokenizer {name}: {problem}; or use bytes")


@contextmanager
def guarded(where: str) -> Iterator[None]:
    """Convert exceptions and panics of the libraries to UsageError, without their messages.

    Panics aren't Exceptions, and the library prints them first: standard error is redirected.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (KeyboardInterrupt, SystemExit, SignalError, FsdpctlError, MemoryError):
        raise
    except BaseException as error:
        raise UsageError(f"{where}: {' '.join(str(error).split()):.200}") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _copied(files: Mapping[str, bytes], where: str) -> dict[str, bytes]:
    """Return the files that transformers may read, after the checks that it doesn't make.

    Sizes in a config.json may not be those of any model.
    """
    known = {
        name: content
        for name, content in files.items()
        if name in TOKENIZER_FILES or name.startswith(_TEMPLATE_PIECE)
    }
    parsed = {
        name: parse_json(content, dict[str, Any], f"{where}: {name}")
        for name, content in files.items()
        if name.endswith(".json") and (name in known or name == CONFIG_JSON)
    }
    _check_named(parsed, where)
    if TOKENIZER_JSON in parsed:
        _check_json(parsed[TOKENIZER_JSON], f"{where}: {TOKENIZER_JSON}")
    changed = {}
    if TOKENIZER_CONFIG in parsed:
        settings = parsed[TOKENIZER_CONFIG]
        if settings.get("fast_tokenizer_files", [TOKENIZER_JSON]) != [TOKENIZER_JSON]:
            raise UsageError(f"{where}: fast_tokenizer_files in {TOKENIZER_CONFIG}: not supported")
        # A path in the settings could lead out of the directory.
        changed[TOKENIZER_CONFIG] = {
            key: value
            for key, value in settings.items()
            if key not in _NOT_A_SETTING and not key.endswith("_file")
        }
    if CONFIG_JSON in parsed:
        changed[CONFIG_JSON] = class_keys(files[CONFIG_JSON])
    return known | {name: json.dumps(content).encode() for name, content in changed.items()}


def class_keys(content: bytes | None) -> dict[str, Any]:
    """Return the keys of a config.json that decide the class of the tokenizer next to it."""
    config = parse_json(content or b"{}", dict[str, Any], CONFIG_JSON)
    found = {key: config[key] for key in _OF_THE_CLASS if key in config}
    for part in ("encoder", "decoder"):
        if isinstance(inner := config.get(part), dict):
            found[part] = {key: inner[key] for key in _OF_THE_CLASS if key in inner}
    return found


def _check_named(parsed: Mapping[str, dict[str, Any]], where: str) -> None:
    """Check the number of named tokens: transformers compares each with all added ones."""
    named, added = 0, len(parsed.get("added_tokens.json", {}))
    added += _size(parsed.get(TOKENIZER_JSON, {}).get("added_tokens"))
    for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
        content = parsed.get(name, {})
        lists = (content.get(f"{kind}_special_tokens") for kind in ("extra", "additional"))
        named += len(content) + sum(map(_size, lists))
        added += _size(content.get("added_tokens_decoder"))
    if named * (named + added) > _MOST_COMPARED:
        raise UsageError(f"{where}: {named + added:,} special tokens are too many")


def _size(value: object) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _check_json(about: Mapping[str, Any], where: str) -> None:
    """Check that no part of a tokenizer.json lengthens text without bounds."""
    steps, decoders = _nodes(about.get("normalizer")), _nodes(about.get("decoder"))
    contents = [str(each.get("content", each.get("prepend", ""))) for each in (*steps, *decoders)]
    too_large = len(contents) > _MOST_NODES or max(map(len, contents), default=0) > _MOST_CONTENT
    if too_large or prod(max(1, len(each)) for each in contents[len(steps) :]) > _MOST_GROWTH:
        raise UsageError(f"{where}: normalizer or decoder too large")
    if len(json.dumps(about.get("post_processor"))) > _MOST_POST_PROCESSOR:
        raise UsageError(f"{where}: post_processor too large")
    pieces = _pieces(steps) if steps else {}
    for step in steps:
        with guarded(where):
            normalizer = JsonTokenizer.from_str(json.dumps({**_NOTHING, "normalizer": step}))
            pieces = {k: normalizer.normalizer.normalize_str(text) for k, text in pieces.items()}
        if any(len(text) > _MOST_GROWTH * len(before) for before, text in pieces.items()):
            raise UsageError(f"{where}: normalizer: lengthens text by more than {_MOST_GROWTH}")


def _nodes(node: object) -> list[dict[str, Any]]:
    """Return the leaves of a tree of normalizers or decoders, in order."""
    if not isinstance(node, dict):
        return []
    inner = node.get("normalizers", node.get("decoders"))
    return (
        [node] if not isinstance(inner, list) else [leaf for each in inner for leaf in _nodes(each)]
    )


def _pieces(steps: list[dict[str, Any]]) -> dict[str, str]:
    """Return short texts that normalizers may lengthen: what they name, and some of Unicode."""
    named = [str(each["pattern"].get("String", "")) for each in steps if "pattern" in each]
    written = set(json.dumps(steps, ensure_ascii=False))
    some = {chr(code) for code in range(0x20, 0xD800, 101)}
    return {each: each for each in (*named, *sorted(written | some)) if each}
