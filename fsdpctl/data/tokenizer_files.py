"""The files of a tokenizer, and how transformers opens them.

Note: transformers reads a copy, because the directory may be hostile or change meanwhile. The copy
has the regular files that were read and verified, without code and links. Its config.json has only
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
_IGNORED_KEYS = ("tokenizer_object", "gguf_file", "fast_selected", "init_inputs")
_TEMPLATES_PREFIX = f"{TEMPLATES}/"


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory or GGUF file has a description of a tokenizer."""
    if is_gguf(path):
        kind: object = read_header(path).metadata.get("tokenizer.ggml.model", "none")
        return kind != "none"
    return any((path / name).is_file() for name in VOCABULARIES)


def read_files(path: Path, *others: str) -> dict[str, bytes]:
    """Read the existing files of a tokenizer, and `others`; return contents by relative name.

    For a GGUF file, the contents are what transformers would save. UsageError if a file is too
    large, not regular, or links out of the directory.
    """
    if is_gguf(path):
        files = _files_of_gguf(path.absolute(), path.stat().st_mtime_ns)
        return {name: text for name, text in files.items() if name != CONFIG_JSON or name in others}
    names, templates = [*TOKENIZER_FILES, *others], path / TEMPLATES
    if templates.is_symlink():
        raise UsageError(f"{templates}: expected a directory, got a link")
    if templates.is_dir():
        jinja = sorted(each.name for each in templates.iterdir() if each.name.endswith(".jinja"))
        names += (checked_asset_name(f"{TEMPLATES}/{x}", str(path), UsageError) for x in jinja)
    return {name: read_regular(path / name) for name in names if os.path.lexists(path / name)}


@lru_cache(maxsize=2)
def _files_of_gguf(path: Path, mtime_ns: int) -> dict[str, bytes]:
    files = {CONFIG_JSON: json.dumps(config_of_gguf(path)).encode()}
    if not has_tokenizer(path):
        return files
    scratch = tempfile.TemporaryDirectory(prefix="fsdpctl-")
    with library_errors(f"tokenizer {path}"), scratch as folder:
        from transformers import PreTrainedTokenizerFast  # takes a second
        from transformers.integrations import gguf

        library: Any = gguf
        architecture, content, settings = library.get_gguf_tokenizer(str(path))
        if content.get("merges") == NO_MERGES:
            content["merges"] = []
        backend, _ = library.convert_gguf_tokenizer(architecture, content)
        fast: Any = PreTrainedTokenizerFast
        fast(tokenizer_object=backend, **settings).save_pretrained(folder)
        files |= read_files(Path(folder))
    metadata = read_header(path).metadata
    tokenizer, settings = (json.loads(files[name]) for name in (TOKENIZER_JSON, TOKENIZER_CONFIG))
    # Tokenizer classes of transformers add default tokens, for which the embedding has no rows.
    added, count = tokenizer["added_tokens"], metadata[GGUF_TOKENS].count
    tokenizer["added_tokens"] = [each for each in added if each["id"] < count]
    excess = {each["content"] for each in added if each["id"] >= count}
    settings = {name: None if value in excess else value for name, value in settings.items()}
    settings["tokenizer_class"] = "TokenizersBackend"
    json_text = metadata.get(GGUF_TOKENIZER, json.dumps(tokenizer))
    texts = {TOKENIZER_JSON: json_text, TOKENIZER_CONFIG: json.dumps(settings)}
    return files | {name: text.encode() for name, text in texts.items()}


def checked_asset_name(name: str, location: str, error_type: type[FsdpctlError]) -> str:
    """Check that a data file next to weights may have a name; return the name."""
    kinds = r".*\.(jinja|json|model|txt|spm|codes|tokenizer)"
    if name.startswith(_TEMPLATES_PREFIX):
        checked_name(name.removeprefix(_TEMPLATES_PREFIX), r".*\.jinja", location, error_type)
        return name
    return checked_name(name, kinds, location, error_type)


def load_tokenizer(name: str, files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer that `AutoTokenizer` loads from `files`, contents by name.

    UsageError if a file is damaged, or if transformers can't load the tokenizer.
    """
    location = f"tokenizer {name}"
    contents = _files_to_copy(files, location)
    with library_errors(location), tempfile.TemporaryDirectory(prefix="fsdpctl-") as folder:
        for each, content in contents.items():
            path = Path(folder, each)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        from transformers import AutoTokenizer  # takes a second

        try:
            load = AutoTokenizer.from_pretrained
            hf = load(folder, local_files_only=True, trust_remote_code=False)
            # Without their files, some classes create a tokenizer that has no tokens.
            if hf.vocab_files_names and not files.keys() & set(VOCABULARIES[1:]):
                raise ValueError
        except Exception as error:
            raise _load_error(name, str(error).replace(folder, name), files) from None
    return hf


def _load_error(name: str, text: str, files: Mapping[str, bytes]) -> UsageError:
    if "trust_remote_code" in text:
        problem = "requires code in the directory (auto_map), which fsdpctl does not run"
    elif TOKENIZER_JSON in files:
        problem = f"transformers: {' '.join(text.split()):.200}"
    else:
        problem = (
            f"{TOKENIZER_JSON} not found, and transformers cannot load the other files; create it "
            "with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return UsageError(f"tokenizer {name}: {problem}; or use bytes")


@contextmanager
def library_errors(location: str) -> Iterator[None]:
    """Convert exceptions and panics of tokenizer libraries to UsageError.

    A panic of Rust is not an `Exception`, and the library prints panics before Python sees them.
    So all exceptions are caught, and standard error is redirected.
    """
    try:
        with silenced_stderr(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (KeyboardInterrupt, SystemExit, SignalError, FsdpctlError, MemoryError):
        raise
    except BaseException as error:
        raise UsageError(f"{location}: {' '.join(str(error).split()):.200}") from None


def _files_to_copy(files: Mapping[str, bytes], location: str) -> dict[str, bytes]:
    """Return the files that transformers may read, after checks that transformers omits."""
    names = (x for x in files if x in TOKENIZER_FILES or x.startswith(_TEMPLATES_PREFIX))
    selected = {name: files[name] for name in names}
    parsed = {
        name: parse_json(content, dict[str, Any], f"{location}: {name}")
        for name, content in files.items()
        if name.endswith(".json") and (name in selected or name == CONFIG_JSON)
    }
    contents = {}
    if TOKENIZER_CONFIG in parsed:
        settings = parsed[TOKENIZER_CONFIG]
        if settings.get("fast_selected", [TOKENIZER_JSON]) != [TOKENIZER_JSON]:
            raise UsageError(f"{location}: fast_selected in {TOKENIZER_CONFIG}: not supported")
        # A path in the settings could lead out of the directory.
        contents[TOKENIZER_CONFIG] = {
            key: value
            for key, value in settings.items()
            if key not in _IGNORED_KEYS and not key.endswith("_file")
        }
    if CONFIG_JSON in parsed:
        contents[CONFIG_JSON] = class_keys(files[CONFIG_JSON])
    return selected | {name: json.dumps(content).encode() for name, content in contents.items()}


def class_keys(content: bytes | None) -> dict[str, Any]:
    """Return the keys of a config.json that decide the class of the tokenizer next to it."""
    config = parse_json(content or b"{}", dict[str, Any], CONFIG_JSON)
    keys = {key: config[key] for key in _CLASS_KEYS if key in config}
    for part in ("encoder", "decoder"):
        if isinstance(inner := config.get(part), dict):
            keys[part] = {key: inner[key] for key in _CLASS_KEYS if key in inner}
    return keys
