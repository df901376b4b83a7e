"""Compare loss masks with TRL's: `python -m tests.chats.against_trl TRL/trl/chat_templates`."""

import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import transformers.utils.chat_template_utils as theirs

from tests.chats.families import FAMILIES, Family, say
from tests.chats.opened import opened
from tests.chats.test_parity import _Clock, completed, with_transformers

CHATS = {
    "one turn": say("Hello there", "I am fine"),
    "turns": say("Hello there", "I am fine", "What is it?", "yes  no\n\nmaybe"),
}
_CONTROL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|<eos>|\[/?INST\]|</?s>"
)


def outcome(folder: Path, name: str, kind: str, plain: str, marked: str) -> str:
    """Return `equal`, or how the tokens or the masks of a conversation differ."""
    try:
        result = opened(folder, name, [{"messages": CHATS[kind]}], plain)
    except Exception as error:
        return f"refused: {str(error).partition(': ')[2]:.110}"
    options = {"return_assistant_tokens_mask": True, "chat_template": marked}
    options["tokenizer_kwargs"] = {"return_offsets_mapping": True}
    encoding = with_transformers(folder / "tokenizer", CHATS[kind], **options)
    mask = completed(encoding["assistant_masks"], encoding["offset_mapping"])
    tokens = encoding["input_ids"]
    if [result.train[n][0].tolist() for n in range(len(result.train))] != [tokens]:
        return f"other tokens, in {len(result.train)} samples"
    differing: dict[bool, list[int]] = {True: [], False: []}
    for token, one, other in zip(tokens, mask, result.train.loss_mask.tolist(), strict=True):
        if bool(one) != other:
            differing[other].append(token)
    ours, trl = (result.tokenizer.decode(x, skip_special_tokens=False) for x in differing.values())
    return f"only TRL trains {trl!r}, only fsdpctl {ours!r}" if ours or trl else "equal"


def main(folder: Path) -> None:
    for file in sorted(folder.glob("*_training.jinja")):
        name, marked = file.name[:-15], file.read_text()
        plain = (folder / f"{name}.jinja").read_text()
        controls = tuple({*_CONTROL.findall(plain), "<|endoftext|>", "<bos>"})
        family = Family(controls, "<bos>", "<|endoftext|>")
        for kind in CHATS:
            with (
                tempfile.TemporaryDirectory() as scratch,
                mock.patch.object(theirs, "datetime", _Clock),
                mock.patch.dict(FAMILIES, {name: family}),
            ):
                pair = [outcome(Path(scratch), name, kind, x, marked) for x in (plain, marked)]
            print(f"{name}, {kind}: {pair[0]}; with TRL's template here: {pair[1]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
