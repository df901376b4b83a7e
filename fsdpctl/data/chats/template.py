"""The chat template of a model's directory, and the named tokens that it may write."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdpctl.data.tokenizer import FileTokenizer
from fsdpctl.errors import UsageError
from fsdpctl.io.documents import MIB, read_json
from fsdpctl.io.files import read_text_file

TEMPLATE_FILE, _MORE = "chat_template.jinja", "additional_chat_templates"
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_DEFAULT, _TOOLS = "default", "tool_use"
_MOST_BYTES = MIB  # fifty times the longest published template
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The text of a template and its location."""

    text: str
    tool_text: str  # for conversations with tools; usually the same
    source: str  # for messages
    special_tokens: dict[str, str]

    @property
    def tells_date(self) -> bool:
        """Whether the template may write today's date."""
        return "strftime_now" in self.text + self.tool_text

    @property
    def checksum(self) -> str:
        """A checksum of everything that determines the output, except the date."""
        parts = [self.text, self.tool_text, *sorted(map(str, self.special_tokens.items()))]
        return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def control_pattern(tokenizer: FileTokenizer) -> str:
    """Return a regular expression that matches the tokenizer's control tokens; empty if none."""
    # Longest first: some control tokens begin with others.
    controls = sorted(tokenizer.controls, key=lambda text: (-len(text), text))
    return "|".join(re.escape(each) for each in controls if each)


def open_template(folder: Path, file: str | None) -> ChatTemplate:
    """Return the template in `file` (`data.template`), else that of a tokenizer's directory.

    As in transformers, chat_template.jinja takes precedence over tokenizer_config.json, and a
    template named `tool_use` is for conversations with tools.

    Raises:
        UsageError: If there is no template.
    """
    tokens = special_tokens(folder)
    if file is not None:
        text = read_text_file(Path(file), _MOST_BYTES, follows=True)
        return ChatTemplate(text, text, file, tokens)
    named, source = _templates(folder)
    if not named:
        raise UsageError(
            f"{folder}: the tokenizer has no chat template; expected {TEMPLATE_FILE}, or "
            f"chat_template in {_CONFIG}; or set data.template=FILE"
        )
    if _DEFAULT not in named:
        raise UsageError(
            f"{folder}: no default among the chat templates {', '.join(sorted(named))}; set "
            "data.template=FILE"
        )
    return ChatTemplate(named[_DEFAULT], named.get(_TOOLS, named[_DEFAULT]), source, tokens)


def _templates(folder: Path) -> tuple[dict[str, str], str]:
    """Return all templates of a directory by name, and the location of the default one."""
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
    content = _config(folder).get("chat_template")
    where = f"{folder / _CONFIG}: chat_template"
    if content is None:
        return {}, ""
    if isinstance(content, str):
        return {_DEFAULT: content}, where
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        named = {str(each.get("name")): each.get("template") for each in content}
        texts = {name: text for name, text in named.items() if isinstance(text, str)}
        if len(texts) == len(content):
            return texts, where
    raise UsageError(f"{where}: expected text or a list of named texts")


def _config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    return read_json(file, dict[str, Any]) if file.is_file() else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the tokens that a tokenizer's directory names, such as `bos_token`, if set."""
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
