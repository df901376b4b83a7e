"""A small tokenizer."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


@pytest.fixture
def word_tokenizer(tmp_path):
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2, "<end>": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder
