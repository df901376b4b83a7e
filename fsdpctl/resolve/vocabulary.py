"""The vocabulary of a model that gets new tokens, or has the embeddings of a PEFT directory."""

import json
from dataclasses import replace
from pathlib import Path

from torch import nn

from fsdpctl.checkpoint.peft import stored_rows
from fsdpctl.checkpoint.pretrained import find_tokenizer
from fsdpctl.checkpoint.resized_embeddings import TIE_KEY
from fsdpctl.config.decoder_config import canonical_json, config_dict, config_value
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.peft import saves_tied_weights
from fsdpctl.config.schema import Config, ConfigT
from fsdpctl.data.new_tokens import open_run_tokenizer
from fsdpctl.data.tokenizer import FileTokenizer, open_tokenizer
from fsdpctl.data.tokenizer_files import has_tokenizer
from fsdpctl.models.build_model import build_base_model
from fsdpctl.models.lora import fully_trained_modules
from fsdpctl.models.module_spec import vocabulary_shapes

_ROW_MULTIPLE = 64  # rows of embeddings are a multiple, which is fast on GPUs


def with_vocabulary(config: ConfigT) -> ConfigT:
    """Return a configuration with the vocabulary size and the weight tying of the trained model.

    UsageError if the new tokens can't be added to the tokenizer.
    """
    path = config.model.path
    is_local = path is not None and Path(path).exists()
    if config.model.lora.path is not None and config.model.is_pretrained:
        config = _as_in_peft(config, config.model.lora.path)
    if not config.data.new_token_texts or config.model.vocab_size is None:
        return config
    data, size = config.data, config.model.vocab_size
    if data.tokenizer is None and is_local:
        data = replace(data, tokenizer=find_tokenizer(Path(str(path))))
    if data.tokenizer is None and path is not None and not is_local:  # the tokenizer is not here
        return config.changed({"model.vocab_size": _padded(size + len(data.new_token_texts))})
    tokenizer = open_run_tokenizer(data)
    assert isinstance(tokenizer, FileTokenizer)
    if tokenizer.vocab_size > size:
        config = config.changed({"model.vocab_size": _padded(tokenizer.vocab_size)})
    if tokenizer.first_new_id is None or not config.model.is_pretrained:
        return config
    return config.changed({"model.first_new_token": tokenizer.first_new_id})


def notes_on_new_rows(config: Config, module: nn.Module) -> tuple[str, ...]:
    """Return lines about embedding rows of new tokens, and about parameters with frozen rows."""
    if (first := config.model.first_new_token) is None:
        return ()
    shapes, _ = vocabulary_shapes(module)
    frozen = [name for name in shapes if not module.get_parameter(name).requires_grad]
    line = f"rows of {', '.join(shapes)} from {first:,}: initialized with the mean of earlier rows"
    if not frozen:
        return (line,)
    modules = ",".join(name.split(".")[-2] for name in shapes)
    key = "model.lora.also" if config.model.lora.rank is not None else "model.trainable"
    return (line, f"{', '.join(frozen)}: has rows of new tokens, not trained; set {key}={modules}")


def _padded(count: int) -> int:
    return -(-count // _ROW_MULTIPLE) * _ROW_MULTIPLE


def _as_in_peft(config: ConfigT, path: str) -> ConfigT:
    """Return a configuration with the embeddings, tying and tokenizer of a PEFT directory."""
    model = config.model
    module = build_base_model(model)
    shapes, all_names = vocabulary_shapes(module)
    saved_rows = stored_rows(Path(path), all_names)
    also = fully_trained_modules(module, model.lora.also)
    is_trained = any(name.rpartition(".")[0] in also for name in all_names)
    # Tied parameters have several names and one shape. PEFT unties them if it trains one of them,
    # unless it keeps them tied and the directory has both.
    is_tied = len(all_names) > len(shapes) and bool(config_value(model, TIE_KEY))
    if (
        is_trained
        and is_tied
        and not (saves_tied_weights(path) and len(saved_rows) == len(all_names))
    ):
        config = replace(config, model=_untied(model))
    base_tokenizer = find_tokenizer(Path(str(model.path)))
    num_rows = max(saved_rows.values(), default=0)
    if config.data.tokenizer in (None, base_tokenizer) and _has_new_tokens(path, base_tokenizer):
        config = config.changed({"data.tokenizer": path})
    if num_rows <= (model.vocab_size or 0):
        return config
    return config.changed({"model.vocab_size": num_rows, "model.first_new_token": model.vocab_size})


def _has_new_tokens(adapters: str, base: str | None) -> bool:
    """Return whether the tokenizer next to adapters has tokens that the base model lacks."""
    if not has_tokenizer(Path(adapters)):
        return False
    tokenizer, base_tokenizer = (open_tokenizer(each) for each in (adapters, base))
    if not (isinstance(tokenizer, FileTokenizer) and isinstance(base_tokenizer, FileTokenizer)):
        return True
    return bool(tokenizer.hf.get_vocab().items() - base_tokenizer.hf.get_vocab().items())


def _untied(model: ModelConfig) -> ModelConfig:
    """Return a model with an output head that is separate from the embedding, as in PEFT."""
    overrides = json.loads(model.overrides or "{}") | {TIE_KEY: False}
    content = config_dict(model) | {TIE_KEY: False}
    return replace(model, overrides=canonical_json(overrides), config_json=canonical_json(content))
