"""Which template a model's directory has, and the named tokens that it may write."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, read_json
from fsdpctl.io.files import read_text_file

TEMPLATE_FILE, _MORE = "chat_template.jinja", "additional_chat_templates"
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_DEFAULT, _TOOLS = "default", "tool_use"
_MOST_BYTES = MIB  # the longest published has a fiftieth of it
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's text and where it is from."""

    text: str
    tool_text: str  # for conversations with tools; mostly the same
    source: str  # to be shown
    special_tokens: dict[str, str]

    @property
    def tells_date(self) -> bool:
        """Whether it may write today's date."""
        return "strftime_now" in self.text + self.tool_text

    @property
    def checksum(self) -> str:
        """Identifies all that decides what it writes, but the date."""
        parts = [self.text, self.tool_text, *sorted(map(str, self.special_tokens.items()))]
        return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def open_template(folder: Path, file: str | None) -> ChatTemplate:
    """The template in `file` (`data.template`), else the one that a tokenizer's directory has.

    As transformers does, chat_template.jinja is preferred to what tokenizer_config.json says, and
    one named `tool_use` is for conversations with tools.

    Raises:
        UsageError: there is none.
    """
    tokens = special_tokens(folder)
    if file is not None:
        text = read_text_file(Path(file), _MOST_BYTES, follows=True)
        return ChatTemplate(text, text, file, tokens)
    named, source = _templates(folder)
    if not named:
        raise UsageError(
            f"{folder}: its tokenizer has no chat template ({TEMPLATE_FILE}, or chat_template in "
            f"{_CONFIG}); data.template=FILE gives one"
        )
    if _DEFAULT not in named:
        raise UsageError(
            f"{folder}: of its chat templates none is the default ({', '.join(sorted(named))}); "
            "data.template=FILE chooses one"
        )
    return ChatTemplate(named[_DEFAULT], named.get(_TOOLS, named[_DEFAULT]), source, tokens)


def _templates(folder: Path) -> tuple[dict[str, str], str]:
    """All that the directory has, by name, and the file that the default is in."""
    found: dict[str, str] = {}
    if (folder / _MORE).is_dir():
        found = {
            each.stem: read_text_file(each, _MOST_BYTES)
            for each in sorted((folder / _MORE).glob("*.jinja"))
        }
    if (folder / TEMPLATE_FILE).is_file():
        own = read_text_file(folder / TEMPLATE_FILE, _MOST_BYTES)
        return {**found, _DEFAULT: own}, str(folder / TEMPLATE_FILE)
    if found:
        return found, str(folder / _MORE)
    said = _config(folder).get("chat_template")
    where = f"{folder / _CONFIG}: chat_template"
    if said is None:
        return {}, ""
    if isinstance(said, str):
        return {_DEFAULT: said}, where
    if isinstance(said, list) and all(isinstance(each, dict) for each in said):
        named = {str(each.get("name")): each.get("template") for each in said}
        texts = {name: text for name, text in named.items() if isinstance(text, str)}
        if len(texts) == len(said):
            return texts, where
    raise UsageError(f"{where}: is neither text nor a list of named texts")


def _config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    return read_json(file, dict[str, Any]) if file.is_file() else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that a tokenizer's directory names: `bos_token` and the like, if they are set."""
    config = _config(folder)
    old = folder / _MAP
    if "added_tokens_decoder" not in config and old.is_file():
        config |= read_json(old, dict[str, Any])
    found = {name: _content(config.get(name)) for name in _NAMED}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        more = config.get(key)
        if isinstance(more, dict):
            found |= {str(name): _content(value) for name, value in more.items()}
    return {name: text for name, text in found.items() if text is not None}


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
