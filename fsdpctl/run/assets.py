"""Assets: files that an export needs next to the weights (tokenizer files, config.json …)."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.manifest import GENERATION_CONFIG, MODEL_CONFIG_FILES
from fsdpctl.checkpoint.pretrained import read_assets_in, read_model_assets
from fsdpctl.config.decoder_config import model_type_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.tokenizer import FileTokenizer, Tokenizer
from fsdpctl.data.tokenizer_files import TEMPLATE_FILE, TEMPLATE_JSON, TEMPLATES, class_keys
from fsdpctl.errors import UsageError
from fsdpctl.io import files
from fsdpctl.io.run_files import CONFIG_JSON, RUN_ASSETS
from fsdpctl.io.untrusted import parse_json

# Sections of config.json that may describe the text model; see transformers' get_text_config.
_TEXT_SECTIONS = ("text_config", "decoder", "generator", "llm_config", "language_config")
# transformers reads them from config.json only if generation_config.json does not exist.
_COPIED_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")


def collect_assets(config: Config, data: DataSet) -> dict[str, bytes]:
    """Return the files of the model and of the data's tokenizer, by name."""
    path, tokenizer = config.model.path, data.tokenizer
    model_files = {} if path is None else read_model_assets(Path(path))
    assets = {name: content for name, content in model_files.items() if name in MODEL_CONFIG_FILES}
    # If the vocabulary sizes differ, a different tokenizer may have written the tokens of the data.
    fits_tokens = tokenizer.vocab_size == data.vocab_size
    if fits_tokens:
        assets |= _tokenizer_files(tokenizer, config.model, assets)
    ends = [*data.end_tokens, *end_tokens(assets, str(path))]
    if fits_tokens and isinstance(tokenizer, FileTokenizer) and tokenizer.eos_id is not None:
        ends.append(tokenizer.eos_id)
    if data.template is not None:
        replaced = [name for name in assets if name == TEMPLATE_JSON or name.startswith(TEMPLATES)]
        assets = {name: content for name, content in assets.items() if name not in replaced}
        assets[TEMPLATE_FILE] = data.template.encode()
    if ends:
        assets[GENERATION_CONFIG] = _generation_config(tuple(dict.fromkeys(ends)), assets)
    return assets


def _tokenizer_files(
    tokenizer: Tokenizer, model: ModelConfig, assets: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return the tokenizer's files, so that transformers reads the same tokenizer from the export.

    If config.json next to the files would make transformers select another class, return the files
    as transformers saves them, which name the class.
    """
    files = tokenizer.files()
    if not isinstance(tokenizer, FileTokenizer):
        return files
    model_type = model_type_of(model)
    exported = {**_parsed(assets, CONFIG_JSON, "the model"), "model_type": model_type}
    keys = class_keys(tokenizer.model_config)
    configs = [json.dumps(exported).encode(), assets.get(CONFIG_JSON)]
    conflicting = (config for config in configs if class_keys(config) != keys)
    # With each config.json next to it, the tokenizer must give the same tokens, as `checksum` says.
    neighbors = [{} if config is None else {CONFIG_JSON: config} for config in conflicting]
    for read_files in (tokenizer.files, tokenizer.files_as_saved):
        files = read_files()
        exports = (FileTokenizer(tokenizer.name, {**files, **each}) for each in neighbors)
        if all(each.checksum == tokenizer.checksum for each in exports):
            return files
    raise UsageError(
        f"data.tokenizer={tokenizer.name}: transformers reads it as another tokenizer next to the "
        f"config.json of a {model_type} model; expected a tokenizer of such a model"
    )


def _generation_config(tokens: tuple[int, ...], files: Mapping[str, bytes]) -> bytes:
    """Return a generation_config.json with the tokens that end generation.

    Without the token that ends an assistant message, generation would not stop after a message.
    """
    config = _parsed(files, GENERATION_CONFIG, "the model")
    if GENERATION_CONFIG not in files:
        model = _parsed(files, CONFIG_JSON, "the model")
        config = {key: model[key] for key in _COPIED_IDS if model.get(key) is not None}
    if set(_token_ids(config.get("eos_token_id"))) == set(tokens):
        return files[GENERATION_CONFIG]  # it exists, since `tokens` is not empty
    config["eos_token_id"] = list(tokens)
    return (json.dumps(config, indent=2) + "\n").encode()


def end_tokens(files: Mapping[str, bytes], location: str) -> tuple[int, ...]:
    """Return the tokens that end generation, from the files of a model."""
    tokens = _token_ids(_parsed(files, GENERATION_CONFIG, location).get("eos_token_id"))
    for section in _sections(_parsed(files, CONFIG_JSON, location)):
        tokens += _token_ids(section.get("eos_token_id"))
    return tuple(dict.fromkeys(tokens))


def _parsed(files: Mapping[str, bytes], name: str, location: str) -> dict[str, Any]:
    return parse_json(files.get(name, b"{}"), dict[str, Any], f"{location}: {name}")


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for name in _TEXT_SECTIONS:
        if isinstance(inner := config.get(name), dict):
            yield from _sections(inner)


def _token_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]


def write_assets(run_dir: Path, assets: Mapping[str, bytes]) -> None:
    """Write the files to the run directory; UsageError if their directory is a link."""
    for name, content in assets.items():
        file = run_dir / RUN_ASSETS / name
        for folder in (run_dir / RUN_ASSETS, file.parent):
            if folder.is_symlink():
                raise UsageError(f"{folder}: expected a directory, got a link")
            folder.mkdir(exist_ok=True)
        files.write_atomic(file, content)


def read_run_assets(run_dir: Path) -> dict[str, bytes]:
    return read_assets_in(run_dir / RUN_ASSETS)
