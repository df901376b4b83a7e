"""What is worth saying about conversations that were read, a line each."""

from collections.abc import Sequence

from fsdpctl.config.data import DataConfig
from fsdpctl.data.chats.cache import Kept
from fsdpctl.data.chats.files import Source
from fsdpctl.data.chats.template import ChatTemplate
from fsdpctl.data.chats.tokens import ChatTokens

_POLICIES = {
    "split": "each answer is trained as it is when it is the last",
    "last": "only the last answer is trained",
    "keep": "they are trained as they stand",
}


def notes_on(
    kept: Kept,
    files: Sequence[Source],
    template: ChatTemplate | None,
    config: DataConfig,
    today: str,
) -> tuple[str, ...]:
    """The lines, most important first; what did not happen is not in them."""
    lines = [
        f"{file.path}: {name}" + ("" if file.share is None else f", {file.share:.1%} of an epoch")
        for file, name in zip(files, kept.formats, strict=True)
    ]
    if template is not None:
        lines += _of_template(kept, template, config, today)
    lines += [_of_part("train", kept.train, kept.counts.get("chats", 0))]
    if kept.val is not None:
        lines += [_of_part("validation", kept.val, kept.counts.get("val_chats", 0))]
    elif config.val_fraction:
        share = f"data.val_fraction={config.val_fraction:g}"
        lines += [f"no validation: of so few conversations {share} held out none"]
    return (*lines, *_of_counts(kept.counts, config))


def _of_template(kept: Kept, template: ChatTemplate, config: DataConfig, today: str) -> list[str]:
    lines = [f"chat template: {template.source}"]
    answers = _number(kept.counts.get("answers", 0), "answer")
    if config.train_on == "all":
        lines.append("every token has a loss (data.train_on=all)")
    elif kept.counts.get("marked"):
        lines.append(f"{answers}, which the template marks")
    else:
        lines.append(f"{answers}, which were found in what it writes with the tokens that end them")
    if template.tells_date:
        lines.append(f"today, for the template, is {today} (data.date)")
    return lines


def _of_part(name: str, part: ChatTokens, chats: int) -> str:
    tokens = len(part.tokens)
    return (
        f"{name}: {_number(chats, 'conversation')}, {_number(part.num_samples, 'sample')}, "
        f"{tokens:,} tokens, of which {part.num_trained / tokens:.0%} have a loss"
    )


def _of_counts(counts: dict[str, int], config: DataConfig) -> list[str]:
    policy = _POLICIES.get(config.rewritten_turns, "")
    said = {
        "rewritten_chats": "{} in which the template writes answers otherwise once others follow: "
        f"{policy} (data.rewritten_turns={config.rewritten_turns})",
        "not_as_served": "{} behind what is not written as when the model is asked",
        "switched_off": "{} without a loss, as the data says (weight, train)",
        "without_loss": "{} dropped: no token of it has a loss",
        "control_tokens": "{} with control tokens in the text, which are those tokens",
        "left_out": "{} not written by the template as they stand",
        "arguments_as_text": "{} whose calls have arguments as text, as the template takes them",
        "joined_parts": "{} whose parts are one text, as the template takes it",
    }
    nouns = {
        "rewritten_chats": "conversation",
        "not_as_served": "answer",
        "switched_off": "answer",
        "without_loss": "sample",
        "control_tokens": "message",
        "left_out": "message",
    }
    return [
        text.format(_number(counts[name], nouns.get(name, "conversation")))
        for name, text in said.items()
        if counts.get(name)
    ]


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
