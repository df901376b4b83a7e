"""The chat template of a tokenizer, and the named tokens that it may write."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdpctl.data.tokenizer import FileTokenizer
from fsdpctl.data.tokenizer_files import TEMPLATE_FILE, TEMPLATE_JSON, TEMPLATES, TOKENIZER_CONFIG
from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_text_file
from fsdpctl.io.untrusted import parse_json

_DEFAULT, _TOOLS = "default", "tool_use"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The text of a template and its location."""

    text: str
    tool_text: str  # for conversations with tools; usually the same
    location: str  # begins error messages
    special_tokens: dict[str, str]

    @property
    def uses_date(self) -> bool:
        return "strftime_now" in self.text + self.tool_text

    @property
    def checksum(self) -> str:
        """A checksum of everything that determines the output, except the date."""
        parts = [self.text, self.tool_text, *sorted(map(str, self.special_tokens.items()))]
        return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def control_pattern(tokenizer: FileTokenizer) -> str:
    """Return a regular expression that matches the tokenizer's control tokens; empty if none."""
    # Longest first: some control tokens begin with others.
    controls = sorted(tokenizer.control_tokens, key=lambda text: (-len(text), text))
    return "|".join(re.escape(each) for each in controls if each)


def open_template(tokenizer: FileTokenizer, file: str | None) -> ChatTemplate:
    """Return the template in `file` (the setting `data.template`), else the tokenizer's template.

    As in transformers, the template named `tool_use` renders conversations with tools. UsageError
    if there is no template.
    """
    tokens = {name: str(text) for name, text in tokenizer.hf.special_tokens_map.items()}
    if file is not None:
        text = read_text_file(Path(file), follow_links=True)
        return ChatTemplate(text, text, file, tokens)
    template, location = _template_and_location(tokenizer)
    if not template:
        raise UsageError(
            f"{tokenizer.name}: the tokenizer has no chat template; expected {TEMPLATE_FILE}, or "
            f"chat_template in {TOKENIZER_CONFIG}; or set data.template=FILE"
        )
    named = template if isinstance(template, dict) else {_DEFAULT: template}
    texts = {name: text for name, text in named.items() if isinstance(text, str)}
    if len(texts) < len(named):
        raise UsageError(f"{location}: expected text or a list of named texts")
    if _DEFAULT not in texts:
        problem = f"no default among the chat templates {', '.join(sorted(texts))}"
        raise UsageError(f"{tokenizer.name}: {problem}; set data.template=FILE")
    return ChatTemplate(texts[_DEFAULT], texts.get(_TOOLS, texts[_DEFAULT]), location, tokens)


def _template_and_location(tokenizer: FileTokenizer) -> tuple[Any, str]:
    files, folder = tokenizer.files(), Path(tokenizer.name)
    template = tokenizer.hf.chat_template
    # Processors of transformers store the template in this file.
    if not template and TEMPLATE_JSON in files:
        location = str(folder / TEMPLATE_JSON)
        content = parse_json(files[TEMPLATE_JSON], dict[str, Any], location)
        return content.get("chat_template"), location
    if TEMPLATE_FILE in files:
        return template, str(folder / TEMPLATE_FILE)
    if any(name.startswith(TEMPLATES) for name in files):
        return template, str(folder / TEMPLATES)
    return template, f"{folder / TOKENIZER_CONFIG}: chat_template"
