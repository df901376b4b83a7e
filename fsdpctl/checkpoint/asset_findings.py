"""Findings on the files next to exported weights: tokenizer, chat template, configurations."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.findings import Finding, lost_finding
from fsdpctl.checkpoint.manifest import GENERATION_CONFIG, parameter_name
from fsdpctl.checkpoint.tensor_source import TensorSource, tensor_keys
from fsdpctl.config.decoder_config import read_hf_config
from fsdpctl.data.tokenizer_files import (
    TEMPLATE_FILE,
    TEMPLATE_JSON,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCABULARIES,
)
from fsdpctl.errors import CheckpointError, UsageError, shorten_list
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.io.untrusted import as_type, parse_json

_VOCABULARY_WEIGHT = re.compile(
    r"(embed_tokens|\bwte|embed_in|lm_head|embed_out|word_embeddings)\.weight$"
)
# Keys of config.json that do not affect the computation, or that other checks compare.
_UNCOMPARED_KEYS = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "vocab_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "tie_word_embeddings",
}  # fmt: skip


class ModelAssets:
    """The files next to the weights of a model, by name."""

    def __init__(self, files: Mapping[str, bytes], folder: Path) -> None:
        self.files, self.folder = files, folder
        location, error_type = str(folder / TOKENIZER_JSON), CheckpointError
        content = self.json(TOKENIZER_JSON)
        model = as_type(content.get("model") or {}, dict[str, Any], location, error_type)
        # Unigram models have a list of tokens with their scores.
        vocab_type: Any = dict[str, int] | list[tuple[str, float]]
        vocab = as_type(model.get("vocab", {}), vocab_type, location, error_type)
        if isinstance(vocab, list):
            vocab = {token: token_id for token_id, (token, _) in enumerate(vocab)}
        tokens = content.get("added_tokens") or []
        added = as_type(tokens, list[dict[str, Any]], location, error_type)
        self.token_ids: dict[str, int] = vocab | {
            str(x.get("content")): x["id"] for x in added if type(x.get("id")) is int
        }

    def json(self, name: str) -> dict[str, Any]:
        location, content = str(self.folder / name), self.files.get(name, b"{}")
        return parse_json(content, dict[str, Any], location, CheckpointError)

    @property
    def template(self) -> str:
        if TEMPLATE_FILE in self.files:
            return self.files[TEMPLATE_FILE].decode(errors="replace")
        files = (TOKENIZER_CONFIG, TEMPLATE_JSON)
        templates = (self.json(name).get("chat_template") for name in files)
        return next((str(each) for each in templates if each), "")


def check_vocabulary(weights: TensorSource, assets: ModelAssets) -> Iterator[Finding]:
    """Compare the rows of embedding and output head with config.json and the tokenizer's ids."""
    vocab_size = assets.json(CONFIG_JSON).get("vocab_size")
    max_id = max(assets.token_ids.values(), default=-1)
    for name in filter(_VOCABULARY_WEIGHT.search, tensor_keys(weights)):
        rows = (weights.info(name).shape or [0])[0]
        text = f"{parameter_name(name)} has {rows:,} rows"
        if vocab_size not in (None, rows):
            yield lost_finding("vocabulary", f"{text}, {CONFIG_JSON} vocab_size={vocab_size!s:.20}")
        if max_id >= rows:
            yield lost_finding("vocabulary", f"{text}, but the tokenizer has token ID {max_id:,}")


def compare_assets(export: ModelAssets, base: ModelAssets) -> Iterator[Finding]:
    """Compare tokenizer, chat template, generation_config.json and config.json with the base's."""
    yield from _compare_tokenizers(export, base)
    if not export.template and base.template:
        yield lost_finding("chat template", "missing; the base has one")
    elif export.template != base.template:
        yield Finding(
            "chat template", "differs from the base's" if base.template else "not in the base"
        )
    generation, base_generation = export.json(GENERATION_CONFIG), base.json(GENERATION_CONFIG)
    eos = base_generation.get("eos_token_id")
    if base_generation and not generation:
        yield lost_finding(GENERATION_CONFIG, "missing; the base has one")
    elif generation.get("eos_token_id") is None and eos is not None:
        yield lost_finding(GENERATION_CONFIG, f"no eos_token_id; the base has {eos}")
    elif keys := _differing_keys(generation, base_generation, {"transformers_version"}):
        yield Finding(GENERATION_CONFIG, f"differs from the base's in {keys}")
    if CONFIG_JSON not in base.files:  # a run or checkpoint, whose shapes were compared
        return
    configs = [assets.json(CONFIG_JSON) for assets in (export, base)]
    model_type, base_type = (config.get("model_type") for config in configs)
    with suppress(UsageError):  # if transformers has no such text model, compare the files
        configs = [read_hf_config(config, CONFIG_JSON).to_dict() for config in configs]
    if model_type != base_type:
        yield lost_finding(CONFIG_JSON, f"model_type {model_type}; the base has {base_type}")
    elif keys := _differing_keys(configs[0], configs[1], _UNCOMPARED_KEYS):
        yield Finding(CONFIG_JSON, f"differs from the base's in {keys}")


def _compare_tokenizers(export: ModelAssets, base: ModelAssets) -> Iterator[Finding]:
    names = VOCABULARIES[1:]  # without tokenizer_config.json
    base_files = [name for name in names if name in base.files]
    ids, base_ids = export.token_ids, base.token_ids
    changed = sorted(token for token, token_id in base_ids.items() if ids.get(token) != token_id)
    new = sorted(map(repr, ids.keys() - base_ids))
    keys = _differing_keys(export.json(TOKENIZER_JSON), base.json(TOKENIZER_JSON))
    if base_files and export.files.keys().isdisjoint(names):
        yield lost_finding("tokenizer", f"missing; the base has {shorten_list(base_files)}")
    elif not ids or not base_ids:
        return
    elif changed:
        text = f"{len(changed):,} tokens of the base missing or with other IDs"
        yield lost_finding("tokenizer", f"{text}, such as {changed[0]!r}")
    elif new:
        yield Finding("tokenizer", f"{len(new)} tokens more than the base: {shorten_list(new)}")
    elif keys:
        yield lost_finding("tokenizer", f"differs from the base's in {keys}")
    else:
        yield Finding("tokenizer", f"{len(ids):,} tokens, as in the base")


def _differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], skip: Collection[str] = ()) -> str:
    keys = sorted({*a, *b}.difference(skip))
    return shorten_list([key for key in keys if a.get(key) != b.get(key)])
