"""Tokens, begin and end of documents, against transformers."""

import json
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fsdpctl.data.files import Text
from fsdpctl.data.tokenizer import FileTokenizer, open_tokenizer
from fsdpctl.errors import UsageError
from tests.data.layouts import TEXTS, Layout, layouts, write_layout


def _difference(folder: Path, layout: Layout) -> str:
    """Return what differs from transformers, which may refuse a layout as well."""
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        with pytest.raises(UsageError, match=r"^[^\n]*$"):
            open_tokenizer(str(folder))
        return f"refused: {error!r:.60}"
    ours = open_tokenizer(str(folder))
    assert isinstance(ours, FileTokenizer)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        end = theirs.eos_token_id
        has_end = end is None or end in theirs("-")["input_ids"] or expected[-1:] == [end]
        document = ours.encode(Text((text.encode(),))).tolist()
        assert document == [*expected, *([] if has_end else [end])], (layout.name, text)
        assert ours.encode_prompt(text) == (expected or [end or 0]), (layout.name, text)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
        if theirs.is_fast:
            plain = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
            found = ours.encode_texts([text])[0]
            assert found.tokens.tolist() == plain["input_ids"]
            offsets = list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))
            assert offsets == plain["offset_mapping"]
            whole = [*ours.before, *plain["input_ids"], *ours.after]
            assert whole == expected, (layout.name, text)
    again = FileTokenizer("again", ours.files() | {"config.json": ours.model_config or b"{}"})
    assert again.checksum == ours.checksum
    return ""


def test_tokens_are_those_of_transformers_in_every_layout(tmp_path):
    found = {
        each.name: _difference(write_layout(tmp_path / str(number), each), each)
        for number, each in enumerate(layouts())
    }
    refused = {name: why for name, why in found.items() if why}
    assert len(found) >= 100
    assert len(refused) < 5, refused
