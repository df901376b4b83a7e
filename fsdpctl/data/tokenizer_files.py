"""The files of a tokenizer, and their opening by transformers.

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
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdpctl.config.gguf_model import config_of_gguf
from fsdpctl.errors import FsdpctlError, SignalError, UsageError
from fsdpctl.io.files import checked_name, read_regular, silenced_stderr
from fsdpctl.io.gguf_header import GGUF_TOKENIZER, GGUF_TOKENS, is_gguf, read_header
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.io.untrusted import parse_json

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE, TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
TEMPLATES = "additional_chat_templates"  # a directory
# llama.cpp rejects a model without merges. This merge produces no token, so bytes stay bytes.
NO_MERGES = ["\u0100 \u0100"]
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
_CLASS_KEYS = ("model_type", "tokenizer_class", "transformers_version", "model_name")
_IGNORED_KEYS = ("tokenizer_object", "gguf_file", "fast_tokenizer_files", "init_inputs")
_TEMPLATE_PIECE = f"{TEMPLATES}/"


def has_tokenizer(folder: Path) -> bool:
    """Return whether a directory or GGUF file has a description of a tokenizer."""
    if is_gguf(folder):
        kind: object = read_header(folder).metadata.get("tokenizer.ggml.model", "none")
        return kind != "none"
    return any((folder / name).is_file() for name in VOCABULARIES)


def read_files(folder: Path, *others: str) -> dict[str, bytes]:
    """Read the files of a tokenizer that exist, and `others`, by name relative to `folder`.

    Those of a GGUF file are the files that transformers would save. UsageError if a file is too
    large, not regular, or links out of the directory.
    """
    if is_gguf(folder):
        made = _files_of_gguf(folder.absolute(), folder.stat().st_mtime_ns)
        return {name: text for name, text in made.items() if name != CONFIG_JSON or name in others}
    names, more = [*TOKENIZER_FILES, *others], folder / TEMPLATES
    if more.is_symlink():
        raise UsageError(f"{more}: expected a directory, got a link")
    if more.is_dir():
        found = sorted(each.name for each in more.iterdir() if each.name.endswith(".jinja"))
        names += (asset_name(f"{TEMPLATES}/{name}", str(folder), UsageError) for name in found)
    return {name: read_regular(folder / name) for name in names if os.path.lexists(folder / name)}


@lru_cache(maxsize=2)
def _files_of_gguf(path: Path, changed: int) -> dict[str, bytes]:
    found = {CONFIG_JSON: json.dumps(config_of_gguf(path)).encode()}
    if not has_tokenizer(path):
        return found
    with (
        library_errors_as_usage(f"tokenizer {path}"),
        tempfile.TemporaryDirectory(prefix="fsdpctl-") as folder,
    ):
        from transformers import PreTrainedTokenizerFast  # takes a second
        from transformers.integrations import gguf

        theirs: Any = gguf
        architecture, content, settings = theirs.get_gguf_tokenizer(str(path))
        if content.get("merges") == NO_MERGES:
            content["merges"] = []
        backend, _ = theirs.convert_gguf_tokenizer(architecture, content)
        made: Any = PreTrainedTokenizerFast
        made(tokenizer_object=backend, **settings).save_pretrained(folder)
        found |= read_files(Path(folder))
    metadata = read_header(path).metadata
    about, settings = (json.loads(found[name]) for name in (TOKENIZER_JSON, TOKENIZER_CONFIG))
    # Classes of transformers add their usual tokens, for which an embedding has no rows.
    added, count = about["added_tokens"], metadata[GGUF_TOKENS].count
    about["added_tokens"] = [each for each in added if each["id"] < count]
    more = {each["content"] for each in added if each["id"] >= count}
    settings = {name: None if value in more else value for name, value in settings.items()}
    settings["tokenizer_class"] = "TokenizersBackend"
    own = metadata.get(GGUF_TOKENIZER, json.dumps(about))
    return found | {TOKENIZER_JSON: own.encode(), TOKENIZER_CONFIG: json.dumps(settings).encode()}


def asset_name(name: str, location: str, error_type: type[FsdpctlError]) -> str:
    """Return `name` if it can be that of a file with the weights: of data, in this directory.

    An error of type `refusal` if it isn't.
    """
    kinds = r".*\.(jinja|json|model|txt|spm|codes|tokenizer)"
    if name.startswith(_TEMPLATE_PIECE):
        checked_name(name.removeprefix(_TEMPLATE_PIECE), r".*\.jinja", location, error_type)
        return name
    return checked_name(name, kinds, location, error_type)


def load_tokenizer(name: str, files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer that `AutoTokenizer` makes of `files`, contents by name.

    UsageError if a file is damaged, or if transformers can't load it.
    """
    where = f"tokenizer {name}"
    copied = _copied(files, where)
    with library_errors_as_usage(where), tempfile.TemporaryDirectory(prefix="fsdpctl-") as folder:
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
def library_errors_as_usage(location: str) -> Iterator[None]:
    """Convert exceptions and panics of the libraries to UsageError, without their messages.

    Panics aren't Exceptions, and the library prints them first: standard error is redirected.
    """
    try:
        with silenced_stderr(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (KeyboardInterrupt, SystemExit, SignalError, FsdpctlError, MemoryError):
        raise
    except BaseException as error:
        raise UsageError(f"{location}: {' '.join(str(error).split()):.200}") from None


def _copied(files: Mapping[str, bytes], where: str) -> dict[str, bytes]:
    """Return the files that transformers may read, after the checks that it doesn't make."""
    own = (x for x in files if x in TOKENIZER_FILES or x.startswith(_TEMPLATE_PIECE))
    known = {name: files[name] for name in own}
    parsed = {
        name: parse_json(content, dict[str, Any], f"{where}: {name}")
        for name, content in files.items()
        if name.endswith(".json") and (name in known or name == CONFIG_JSON)
    }
    changed = {}
    if TOKENIZER_CONFIG in parsed:
        settings = parsed[TOKENIZER_CONFIG]
        if settings.get("fast_tokenizer_files", [TOKENIZER_JSON]) != [TOKENIZER_JSON]:
            raise UsageError(f"{where}: fast_tokenizer_files in {TOKENIZER_CONFIG}: not supported")
        # A path in the settings could lead out of the directory.
        changed[TOKENIZER_CONFIG] = {
            key: value
            for key, value in settings.items()
            if key not in _IGNORED_KEYS and not key.endswith("_file")
        }
    if CONFIG_JSON in parsed:
        changed[CONFIG_JSON] = class_keys(files[CONFIG_JSON])
    return known | {name: json.dumps(content).encode() for name, content in changed.items()}


def class_keys(content: bytes | None) -> dict[str, Any]:
    """Return the keys of a config.json that decide the class of the tokenizer next to it."""
    config = parse_json(content or b"{}", dict[str, Any], CONFIG_JSON)
    found = {key: config[key] for key in _CLASS_KEYS if key in config}
    for part in ("encoder", "decoder"):
        if isinstance(inner := config.get(part), dict):
            found[part] = {key: inner[key] for key in _CLASS_KEYS if key in inner}
    return found
