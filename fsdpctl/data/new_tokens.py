"""The tokenizer of a run, to which the tokens of `data.new_tokens` are added."""

import re
from itertools import groupby
from pathlib import Path

from fsdpctl.config.data import DataConfig
from fsdpctl.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from fsdpctl.data.tokenizer_files import library_errors
from fsdpctl.errors import UsageError
from fsdpctl.io.files import read_text_file
from fsdpctl.io.run_files import CONFIG_JSON

_CONTROL = re.compile(r"<\|.+\|>")


def open_run_tokenizer(config: DataConfig) -> Tokenizer:
    """Open `data.tokenizer`, and add the tokens of `data.new_tokens` that it lacks.

    A new token becomes a control token if the chat template writes it, or if it looks like
    <|this|>. UsageError if the tokenizer can't be opened, or if tokens can't be added to it.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    if not config.new_token_texts:
        return tokenizer
    location = f"data.new_tokens={config.new_tokens}"
    if not isinstance(tokenizer, FileTokenizer):
        hint = "set model.path or data.tokenizer"
        raise UsageError(f"{location}: requires a model's tokenizer; {hint}")
    from tokenizers import AddedToken

    hf, size, added_vocab = tokenizer.hf, tokenizer.vocab_size, tokenizer.hf.get_added_vocab()
    template = hf.chat_template or ""
    template = "".join(template.values()) if isinstance(template, dict) else template
    if config.template is not None:
        # An empty file does not replace the template.
        template = read_text_file(Path(config.template), follow_links=True) or template
    new_texts = [each for each in config.new_token_texts if each not in added_vocab]
    specials = [each in template or _CONTROL.fullmatch(each) is not None for each in new_texts]
    pairs = zip(new_texts, specials, strict=True)
    new_tokens = [AddedToken(text, normalized=False, special=special) for text, special in pairs]
    old_vocab = hf.get_vocab()
    with library_errors(location):
        # In runs, so that ids keep the order of the setting.
        for is_special, tokens in groupby(new_tokens, lambda each: each.special):
            hf.add_tokens([*tokens], special_tokens=is_special)
    files = tokenizer.files_as_saved()
    if tokenizer.model_config is not None:
        files[CONFIG_JSON] = tokenizer.model_config
    extended = FileTokenizer(tokenizer.name, files)
    vocab = extended.hf.get_vocab()
    ids = sorted(vocab.get(text, -1) for text in config.new_token_texts if text not in old_vocab)
    if ids != [*range(size, size + len(ids))]:
        raise UsageError(f"{location}: the tokenizer {tokenizer.name} cannot get these tokens")
    extended.first_new_id = size if ids else None
    return extended
