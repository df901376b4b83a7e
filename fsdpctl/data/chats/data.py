"""The data of a run, whatever it is: conversations as documents, or what `data` reads."""

import numpy as np

from fsdpctl.config.data import DataConfig
from fsdpctl.data.chats.building import OnRows
from fsdpctl.data.chats.open import open_chats
from fsdpctl.data.chats.tokens import ChatTokens
from fsdpctl.data.documents import DocumentSet, Packing
from fsdpctl.data.source import DataSet, load_data
from fsdpctl.errors import UsageError


def open_data(config: DataConfig, seed: int, on_rows: OnRows = lambda count: None) -> DataSet:
    """Read (or map) the data of a run.

    Args:
        config: the section `data`.
        seed: decides which conversations share a row.
        on_rows: as `open_chats` has it.

    Raises:
        UsageError: it is missing, empty or not what it should be.
    """
    if config.name != "chat":
        if config.packing:
            raise UsageError(f"data.packing=true: is for data=chat, not data={config.name}")
        return load_data(config)
    chats = open_chats(config, on_rows)
    packing = Packing(config.packing is not False, config.too_long, seed)
    where, template = str(config.path), chats.template
    return DataSet(
        _documents(chats.train, packing, where),
        None if chats.val is None else _documents(chats.val, packing, "the validation data"),
        chats.tokenizer,
        chats.vocab_size,
        chats.description,
        gzip_bits_per_byte=None,
        notes=chats.notes,
        date=chats.date if template is not None and template.tells_date else None,
        template=template.text if template is not None and config.template is not None else None,
        end_tokens=chats.end_tokens,
        prompt=_first_prompt(chats.val or chats.train),
    )


def _first_prompt(part: ChatTokens) -> tuple[int, ...]:
    """What stands before the first answer of the first sample."""
    tokens, trained = part.sample(0)
    answers = np.flatnonzero(trained[1:]) + 1
    return tuple(int(each) for each in tokens[: answers[0] if len(answers) else len(tokens)])


def _documents(part: ChatTokens, packing: Packing, origin: str) -> DocumentSet:
    return DocumentSet(part.tokens, part.trained, part.starts, packing, origin, part.checksum)
