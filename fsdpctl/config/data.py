"""The section `data`: text, token files or chats."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from fsdpctl.config.keys import auto_key, key, optional_key
from fsdpctl.errors import UsageError

CHAT, TEXT, TOKENS = "chat", "text", "tokens"
DEFAULT_VAL_FRACTION = 0.02  # if neither a fraction nor validation files are set
MAX_VAL_TOKENS = 1 << 24  # more tokens hardly change a validation loss, and take hours
TOKEN_SUFFIXES = (".bin", ".ds", ".npy")
LOSS_MASK_SUFFIX = ".loss"  # the file has one byte per token: whether the token is trained on
# Suffixes of files that describe token files.
TOKEN_NEIGHBORS = (".json", ".idx", ".index", ".metadata", LOSS_MASK_SUFFIX)
TOKEN_FORMATS = ("auto", "uint16", "uint32", "llm.c", "megatron", "datatrove")
TRAIN_ON = ("assistant", "last", "all")
REWRITTEN = ("split", "keep")
PROMPT_TEMPLATE, PROMPT_ALPACA = "template", "alpaca"
_CHAT_KEYS = ("template", "prompt", "train_on", "rewritten_turns", "date", "too_long")
_ONLY_WITH = {
    **dict.fromkeys(_CHAT_KEYS, (CHAT,)), "new_tokens": (TEXT, CHAT), "packing": (CHAT, TOKENS),
    "format": (TOKENS,),
}  # fmt: skip


def _token_list(text: str) -> str:
    """Return a list of tokens as JSON; UsageError if it's no list, or has a token twice."""
    try:
        tokens = json.loads(text)
    except ValueError:
        inner = text[1:-1] if text[:1] + text[-1:] == "[]" else text
        tokens = [each.strip().strip("'\"") for each in inner.split(",")]
        tokens = None if re.search(r"[\[\]]", inner) else tokens
    is_list = isinstance(tokens, list) and len(tokens) == len({*map(str, tokens)}) > 0
    if not is_list or not all(isinstance(x, str) and x.strip() for x in tokens):
        expected = 'different texts such as [<|user|>,<|end|>], or as JSON ["<|user|>", "<|end|>"]'
        raise UsageError(f"data.new_tokens={text}: expected {expected}")
    return json.dumps(tokens, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The training and validation data."""

    name: str = "python_stdlib"
    path: str | None = optional_key(
        "training data: file, directory, glob, or a mixture PATH:SHARE,PATH:SHARE", is_path=True
    )
    val_path: str | None = optional_key(
        "validation data, in place of data.val_fraction: file, directory or glob", is_path=True
    )
    val_fraction: float | None = auto_key(
        "fraction of the training data that is held out for validation; of token files, at most "
        f"{MAX_VAL_TOKENS:,} tokens; auto: {DEFAULT_VAL_FRACTION}, or none if data.path has "
        "validation files",
        within=(0, 0.5),
    )
    tokenizer: str | None = auto_key(
        "tokenizer: bytes, a directory or a GGUF file; auto: the model's, else bytes", is_path=True
    )
    new_tokens: str | None = optional_key(
        "tokens that are added to the tokenizer, and to embeddings as the mean of their rows, such "
        "as [<|user|>,<|end|>], or JSON for texts with brackets, commas or spaces",
        is_list=True,
        normalize=_token_list,
    )
    format: str = key(
        "auto",
        "tokens: format of the files; auto: by their headers and neighboring files",
        choices=TOKEN_FORMATS,
    )
    template: str | None = auto_key(
        "chat: Jinja file with the chat template; auto: the tokenizer's template", is_path=True
    )
    prompt: str = key(
        PROMPT_TEMPLATE,
        "chat: how rows with an instruction are written: by the chat template, or as Alpaca's text",
        choices=(PROMPT_TEMPLATE, PROMPT_ALPACA),
    )
    train_on: str = key(
        "assistant",
        "chat: tokens that are trained on: assistant messages, the last one, or all tokens",
        choices=TRAIN_ON,
    )
    rewritten_turns: str = key(
        "split",
        "chat: assistant messages that the template changes when later messages follow; split: one "
        "sample per message; keep: the changed text",
        choices=REWRITTEN,
    )
    date: str | None = auto_key(
        "chat: date given to the template, YYYY-MM-DD; auto: the day of the run's first start"
    )
    packing: bool | None = auto_key(
        "chat: pack several samples into one sequence of train.seq_len; auto: true; tokens: true "
        "masks attention between documents of a sequence"
    )
    too_long: str = key(
        "truncate",
        "chat: what to do with samples longer than train.seq_len",
        choices=("truncate", "drop"),
    )
    # Whether the files in data.path select the option, since no setting `data` does.
    is_inferred: bool = field(default=False, compare=False)

    @property
    def new_token_texts(self) -> tuple[str, ...]:
        return tuple(json.loads(self.new_tokens or "[]"))

    @property
    def uses_validation_files(self) -> bool:
        """Whether validation files in data.path are used, since no key of validation is set."""
        return self.val_path is None and self.val_fraction is None

    @property
    def used_val_fraction(self) -> float:
        """The fraction that is held out if there are no validation files."""
        return DEFAULT_VAL_FRACTION if self.val_fraction is None else self.val_fraction

    @property
    def masks_documents(self) -> bool:
        """Whether attention between documents is masked; a chat may be a single document."""
        return self.name == CHAT or (self.name == TOKENS and bool(self.packing))


def check_data_keys(config: DataConfig, typed_names: Collection[str] = ()) -> None:
    """Refuse keys that don't apply to the kind of data.

    A key is set if its value isn't the default, or if it is in `typed_names`. UsageError if a key
    is only valid with another kind.
    """
    default = DataConfig()
    for name, kinds in _ONLY_WITH.items():
        value, key = getattr(config, name), f"data.{name}"
        is_set = value != getattr(default, name) or (key in typed_names and value is not None)
        if config.name in kinds or not is_set or value is False:
            continue
        text = "" if name == "new_tokens" else f"={str(value).lower() if value is True else value}"
        raise UsageError(f"{key}{text}: only valid with {' or '.join(f'data={x}' for x in kinds)}")
