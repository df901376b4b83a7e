"""The tokenizer of a run: that of its model, with the tokens of `data.new_tokens`."""

import re
from itertools import groupby
from pathlib import Path

from fsdpctl.config.data import DataConfig
from fsdpctl.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from fsdpctl.data.tokenizer_files import library_errors_as_usage
from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_text_file
from fsdpctl.io.run_files import CONFIG_JSON

_CONTROL = re.compile(r"<\|.+\|>")


def open_run_tokenizer(config: DataConfig) -> Tokenizer:
    """Open `data.tokenizer`, and add the new tokens that it lacks.

    Those that the chat template writes, or that look like <|this|>, are control tokens. UsageError
    if it can't be opened, or can't get more tokens.
    """
    found = open_tokenizer(config.tokenizer)
    if not config.new_token_texts:
        return found
    where = f"data.new_tokens={config.new_tokens}"
    if not isinstance(found, FileTokenizer):
        raise UsageError(f"{where}: requires a model's tokenizer; set model.path or data.tokenizer")
    from tokenizers import AddedToken

    auto, size, known = found.hf, found.vocab_size, found.hf.get_added_vocab()
    template = auto.chat_template or ""
    template = "".join(template.values()) if isinstance(template, dict) else template
    if config.template is not None:
        template = read_text_file(Path(config.template), follow_links=True) or template
    added = [
        AddedToken(
            text, normalized=False, special=text in template or _CONTROL.fullmatch(text) is not None
        )
        for text in config.new_token_texts
        if text not in known
    ]
    before = auto.get_vocab()
    with library_errors_as_usage(where):
        for is_special, alike in groupby(added, lambda each: each.special):
            auto.add_tokens([*alike], special_tokens=is_special)
    files = found.files_as_saved()
    if found.model_config is not None:
        files[CONFIG_JSON] = found.model_config
    made = FileTokenizer(found.name, files)
    vocab = made.hf.get_vocab()
    ids = sorted(vocab.get(text, -1) for text in config.new_token_texts if text not in before)
    if ids != [*range(size, size + len(ids))]:
        raise UsageError(f"{where}: the tokenizer {found.name} cannot get these tokens")
    made.first_new_id = size if ids else None
    return made
