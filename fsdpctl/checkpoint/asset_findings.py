"""Findings on the files next to exported weights: tokenizer, chat template, configurations."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.findings import Finding, lost_finding
from fsdpctl.checkpoint.manifest import GENERATION_CONFIG, parameter_name
from fsdpctl.checkpoint.tensor_source import TensorSource, tensor_keys
from fsdpctl.config.decoder_config import read_configuration
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
        location, refusal = str(folder / TOKENIZER_JSON), CheckpointError
        content = self.json(TOKENIZER_JSON)
        model = as_type(content.get("model") or {}, dict[str, Any], location, refusal)
        kinds: Any = (
            dict[str, int] | list[tuple[str, float]]
        )  # a list of tokens and scores in unigram models
        vocab = as_type(model.get("vocab", {}), kinds, location, refusal)
        if isinstance(vocab, list):
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        added = as_type(content.get("added_tokens") or [], list[dict[str, Any]], location, refusal)
        self.ids: dict[str, int] = vocab | {
            str(x.get("content")): x["id"] for x in added if type(x.get("id")) is int
        }

    def json(self, name: str) -> dict[str, Any]:
        location, content = str(self.folder / name), self.files.get(name, b"{}")
        return parse_json(content, dict[str, Any], location, CheckpointError)

    @property
    def template(self) -> str:
        if TEMPLATE_FILE in self.files:
            return self.files[TEMPLATE_FILE].decode(errors="replace")
        templates = (
            self.json(name).get("chat_template") for name in (TOKENIZER_CONFIG, TEMPLATE_JSON)
        )
        return next((str(each) for each in templates if each), "")


def check_vocabulary(weights: TensorSource, assets: ModelAssets) -> Iterator[Finding]:
    """Compare the rows of embedding and output head with config.json and the tokenizer's ids."""
    size, last = assets.json(CONFIG_JSON).get("vocab_size"), max(assets.ids.values(), default=-1)
    for name in filter(_VOCABULARY_WEIGHT.search, tensor_keys(weights)):
        rows = (weights.info(name).shape or [0])[0]
        text = f"{parameter_name(name)} has {rows:,} rows"
        if size not in (None, rows):
            yield lost_finding("vocabulary", f"{text}, {CONFIG_JSON} vocab_size={size!s:.20}")
        if last >= rows:
            yield lost_finding("vocabulary", f"{text}, the tokenizer token {last:,}")


def compare_assets(ours: ModelAssets, theirs: ModelAssets) -> Iterator[Finding]:
    """Compare tokenizer, chat template, generation_config.json and config.json with the base's."""
    yield from _compare_tokenizers(ours, theirs)
    our_template, their_template = ours.template, theirs.template
    if our_template != their_template:
        text = "differs from the base's" if our_template and their_template else "not in the base"
        yield Finding(
            "chat template", text if our_template else "missing; the base has one", not our_template
        )
    made, base = ours.json(GENERATION_CONFIG), theirs.json(GENERATION_CONFIG)
    if base and not made:
        yield lost_finding(GENERATION_CONFIG, "missing; the base has one")
    elif made.get("eos_token_id") is None and (end := base.get("eos_token_id")) is not None:
        yield lost_finding(GENERATION_CONFIG, f"no eos_token_id; the base has {end}")
    elif differing := _differing_keys(made, base, {"transformers_version"}):
        yield Finding(GENERATION_CONFIG, f"differs from the base's in {differing}")
    if CONFIG_JSON not in theirs.files:  # a run or a checkpoint: its weights have been compared
        return
    pair = [each.json(CONFIG_JSON) for each in (ours, theirs)]
    kinds = [each.get("model_type") for each in pair]
    with suppress(UsageError):  # not a text model of transformers
        pair = [read_configuration(each, CONFIG_JSON).to_dict() for each in pair]
    if kinds[0] != kinds[1]:
        yield lost_finding(CONFIG_JSON, f"model_type {kinds[0]}, of the base {kinds[1]}")
    elif differing := _differing_keys(pair[0], pair[1], _UNCOMPARED_KEYS):
        yield Finding(CONFIG_JSON, f"differs from the base's in {differing}")


def _compare_tokenizers(ours: ModelAssets, theirs: ModelAssets) -> Iterator[Finding]:
    files, their_files = ([x for x in VOCABULARIES[1:] if x in y.files] for y in (ours, theirs))
    moved = sorted(x for x, number in theirs.ids.items() if ours.ids.get(x) != number)
    new = sorted(map(repr, ours.ids.keys() - theirs.ids))
    differing = _differing_keys(ours.json(TOKENIZER_JSON), theirs.json(TOKENIZER_JSON))
    if their_files and not files:
        yield lost_finding("tokenizer", f"missing; the base has {shorten_list(their_files)}")
    elif not ours.ids or not theirs.ids:
        return
    elif moved:
        text = f"{len(moved):,} tokens of the base missing or with other ids"
        yield lost_finding("tokenizer", f"{text}, such as {moved[0]!r}")
    elif new:
        yield Finding("tokenizer", f"{len(new)} tokens more than the base: {shorten_list(new)}")
    elif differing:
        yield lost_finding("tokenizer", f"differs from the base's in {differing}")
    else:
        yield Finding("tokenizer", f"{len(ours.ids):,} tokens, as in the base")


def _differing_keys(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], ignored: Collection[str] = ()
) -> str:
    names = sorted({*ours, *theirs}.difference(ignored))
    return shorten_list([name for name in names if ours.get(name) != theirs.get(name)])
