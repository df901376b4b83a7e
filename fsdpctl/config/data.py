"""What is trained on: text, token files or chats."""

from dataclasses import dataclass

from fsdpctl.config.keys import key
from fsdpctl.errors import UsageError

CHAT = "chat"  # the choice that the keys below `template` are for
TRAIN_ON = ("assistant", "last", "all")
REWRITTEN = ("split", "last", "keep", "refuse")


_OF_CHATS = ("template", "train_on", "rewritten_turns", "date", "too_long")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is trained on, and what validates."""

    name: str = "python_stdlib"
    path: str | None = key(
        None,
        "file, directory or glob (text); token file (tokens); FILE or FILE:SHARE,FILE:SHARE (chat)",
        is_path=True,
        optional=True,
    )
    val_path: str | None = key(
        None, "the same, for validation, instead of val_fraction", is_path=True, optional=True
    )
    val_fraction: float = key(
        0.02, "share of the data held out for validation", minimum=0, maximum=0.5
    )
    tokenizer: str | None = key(
        None, "bytes, or a directory with a tokenizer.json", is_path=True, auto=True
    )
    template: str | None = key(
        None,
        "chat: a Jinja file; auto: the tokenizer's own chat template",
        is_path=True,
        auto=True,
        is_later=True,
    )
    train_on: str = key(
        "assistant",
        "chat: turns that have a loss; all: every token",
        choices=TRAIN_ON,
        is_later=True,
    )
    rewritten_turns: str = key(
        "split",
        "chat: where the template writes a turn otherwise once others follow: a sample each, the "
        "last alone, as they stand, or none of it",
        choices=REWRITTEN,
        is_later=True,
    )
    date: str | None = key(
        None,
        "chat: what templates take for today, YYYY-MM-DD; auto: today, kept",
        auto=True,
        is_later=True,
    )
    packing: bool | None = key(
        None,
        "several samples in a row of train.seq_len; auto: true for chats",
        auto=True,
        is_later=True,
    )
    too_long: str = key(
        "cut", "chat: samples longer than train.seq_len", choices=("cut", "drop"), is_later=True
    )

    @property
    def holds_documents(self) -> bool:
        """Whether rows can be several documents."""
        return self.name == CHAT


def refuse_keys_of_chats(config: DataConfig) -> None:
    """See that nobody asks of text what only chats have.

    Raises:
        UsageError: a key that is for `data=chat` has another value than its default.
    """
    default = DataConfig()
    for name in _OF_CHATS:
        value = getattr(config, name)
        if value != getattr(default, name):
            raise UsageError(f"data.{name}={value}: only with data={CHAT}")
