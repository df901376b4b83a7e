"""Loss masks beside those of TRL's training templates: `python -m tests.chats.against_trl DIR`.

DIR is trl/chat_templates of an installed TRL. Tokens and masks of TRL are those that transformers
makes with NAME_training.jinja; ours are made with NAME.jinja, which the model comes with.
"""

import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

from tests.chats.families import FAMILIES, Family, say
from tests.chats.opened import opened
from tests.chats.test_parity import completed, with_transformers

CHATS = {
    "one turn": say("Hello there", "I am fine"),
    "turns": say("Hello there", "I am fine", "What is it?", "yes  no\n\nmaybe"),
    "system": say("hi", "a good day", system="You are helpful"),
    "blanks": say(" \n hi ", "\n\n two lines\n", "ok", " and   spaces "),
    "reasoning": say("hi", "<think>\nthe quick fox\n</think>\n\nyes", "and?", "no"),
}
_CONTROL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|<eos>|\[/?INST\]|</?s>"
)
_ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "cohere2": "<|END_OF_TURN_TOKEN|>", "gemma": "<eos>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>", "deepseekv3": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<eos>", "gemma3": "<eos>", "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>", "idefics3": "<end_of_utterance>", "llama3": "<|eot_id|>",
    "llava_next": "</s>", "muse_glimmer": "<|eot|>", "phi3": "<|endoftext|>",
    "phi3_5": "<|endoftext|>", "smolvlm": "<end_of_utterance>",
}  # fmt: skip


def outcome(folder: Path, name: str, kind: str) -> str:
    """Return `equal`, or how the tokens or the masks of a conversation differ."""
    plain, marked = ((folder / f"{name}{x}.jinja").read_text() for x in ("", "_training"))
    end = _ENDS.get(name, "<|im_end|>")
    family = Family(tuple(dict.fromkeys([*_CONTROL.findall(plain), end, "<bos>"])), "<bos>", end)
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(FAMILIES, {name: family}):
        place = Path(scratch)
        try:
            made = opened(place, name, [{"messages": CHATS[kind]}], plain)
        except Exception as error:
            return f"refused: {str(error).partition(': ')[2]:.110}"
        found = made.train
        samples = [[each.tolist() for each in found[n]] for n in range(len(found))]
        about = {"return_assistant_tokens_mask": True, "chat_template": marked}
        offsets = {"tokenizer_kwargs": {"return_offsets_mapping": True}}
        try:
            theirs = with_transformers(place / "tokenizer", CHATS[kind], **about, **offsets)
        except Exception as error:
            return f"TRL refuses: {error!s:.90}"
    mask = [bool(x) for x in completed(theirs["assistant_masks"], theirs["offset_mapping"])]
    tokens = theirs["input_ids"]
    if samples == [[tokens, mask]]:
        return "equal"
    if [x for x, _ in samples] != [tokens]:
        last = samples[-1][0] == tokens
        return f"{len(samples)} samples, the last with {'the same' if last else 'other'} tokens"
    ours = samples[0][1]

    def only(one: list[bool], other: list[bool]) -> str:
        kept = [each for each, a, b in zip(tokens, one, other, strict=True) if a and not b]
        return repr(made.tokenizer.decode(kept, skips=False))[:60]

    return f"only TRL trains {only(mask, ours)}, only fsdpctl {only(ours, mask)}"


def main(folder: Path) -> None:
    names = sorted(each.name[:-15] for each in folder.glob("*_training.jinja"))
    for name in names:
        said = {kind: outcome(folder, name, kind) for kind in CHATS}
        for each in dict.fromkeys(said.values()):
            kinds = [kind for kind in said if said[kind] == each]
            print(f"{name}: {'all' if len(kinds) == len(said) else ', '.join(kinds)}: {each}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
