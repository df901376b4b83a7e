"""Findings on the files with an export's weights: tokenizer, chat template, configurations."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.findings import Finding
from fsdpctl.checkpoint.manifest import GENERATION_CONFIG, parameter_name
from fsdpctl.checkpoint.source import Tensors, tensor_keys
from fsdpctl.config.any_decoder import read_configuration
from fsdpctl.data.tokenizer_files import (
    TEMPLATE_FILE,
    TEMPLATE_JSON,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCABULARIES,
)
from fsdpctl.errors import CheckpointError, UsageError, first_of
from fsdpctl.io.run_files import CONFIG_JSON
from fsdpctl.io.untrusted import parse_json

_TABLE = re.compile(r"(embed_tokens|\bwte|embed_in|lm_head|embed_out|word_embeddings)\.weight$")
# Of config.json: no part of the computation, or compared by themselves.
_OTHER_KEYS = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "vocab_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "tie_word_embeddings",
}  # fmt: skip


class Assets:
    """The files with the weights of a model, by name."""

    def __init__(self, files: Mapping[str, bytes], folder: Path) -> None:
        self.files, self.folder = files, folder
        self.ids = self._ids()

    def json(self, name: str) -> dict[str, Any]:
        where = str(self.folder / name)
        content = self.files.get(name, b"{}")
        return parse_json(content, dict[str, Any], where, CheckpointError)

    @property
    def template(self) -> str:
        if TEMPLATE_FILE in self.files:
            return self.files[TEMPLATE_FILE].decode(errors="replace")
        found = (self.json(name).get("chat_template") for name in (TOKENIZER_CONFIG, TEMPLATE_JSON))
        return next((str(each) for each in found if each), "")

    def _ids(self) -> dict[str, int]:
        """Return the tokens of tokenizer.json with their ids."""
        content = self.json(TOKENIZER_JSON)
        vocab = content.get("model", {}).get("vocab", {})
        if isinstance(vocab, list):  # pairs of a token and its score
            vocab = {str(each[0]): number for number, each in enumerate(vocab) if each}
        added = {str(x.get("content")): x.get("id") for x in content.get("added_tokens") or ()}
        return {a: number for a, number in {**vocab, **added}.items() if type(number) is int}


def check_vocabulary(weights: Tensors, assets: Assets) -> Iterator[Finding]:
    """Compare the rows of embedding and head with config.json and the tokenizer's ids."""
    size, last = assets.json(CONFIG_JSON).get("vocab_size"), max(assets.ids.values(), default=-1)
    for key in tensor_keys(weights):
        shape, name = weights.info(key).shape, parameter_name(key)
        if not _TABLE.search(name) or len(shape) != 2:
            continue
        if isinstance(size, int) and shape[0] != size:
            text = f"{name} has {shape[0]:,} rows, {CONFIG_JSON} {size:,}"
            yield Finding("vocabulary", text, is_lost=True)
        if last >= shape[0]:
            text = f"{name} has {shape[0]:,} rows, the tokenizer token {last:,}"
            yield Finding("vocabulary", text, is_lost=True)


def compare_assets(ours: Assets, theirs: Assets) -> Iterator[Finding]:
    """Compare tokenizer, chat template, generation_config.json and config.json with the base's."""
    yield from _tokenizer(ours, theirs)
    one, other = ours.template, theirs.template
    if one != other:
        text = "differs from the base's" if one and other else "not in the base"
        yield Finding("chat template", text if one else "missing; the base has one", not one)
    yield from _generation(ours.json(GENERATION_CONFIG), theirs.json(GENERATION_CONFIG))
    yield from _config(ours.json(CONFIG_JSON), theirs.json(CONFIG_JSON))


def _tokenizer(ours: Assets, theirs: Assets) -> Iterator[Finding]:
    files, known = ([x for x in VOCABULARIES[1:] if x in y.files] for y in (ours, theirs))
    if known and not files:
        yield Finding("tokenizer", f"missing; the base has {first_of(known)}", is_lost=True)
    if not ours.ids or not theirs.ids:
        return
    if moved := sorted(x for x, number in theirs.ids.items() if ours.ids.get(x) != number):
        text = f"{len(moved):,} tokens of the base missing or with other ids, such as {moved[0]!r}"
        yield Finding("tokenizer", text, is_lost=True)
    elif new := sorted(ours.ids.keys() - theirs.ids):
        text = f"{len(new)} tokens more than the base: {first_of(list(map(repr, new)))}"
        yield Finding("tokenizer", text)
    elif differing := _differing(ours.json(TOKENIZER_JSON), theirs.json(TOKENIZER_JSON)):
        yield Finding(
            "tokenizer", f"differs from the base's in {first_of(differing)}", is_lost=True
        )
    else:
        yield Finding("tokenizer", f"{len(ours.ids):,} tokens, as in the base")


def _generation(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Finding]:
    end = theirs.get("eos_token_id")
    if theirs and not ours:
        yield Finding(GENERATION_CONFIG, "missing; the base has one", is_lost=True)
    elif end is not None and ours.get("eos_token_id") is None:
        yield Finding(GENERATION_CONFIG, f"no eos_token_id; the base has {end}", is_lost=True)
    elif differing := _differing(ours, theirs, {"transformers_version"}):
        yield Finding(GENERATION_CONFIG, f"differs from the base's in {first_of(differing)}")


def _config(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Finding]:
    kinds = ours.get("model_type"), theirs.get("model_type")
    if kinds[0] != kinds[1]:
        yield Finding(CONFIG_JSON, f"model_type {kinds[0]}, of the base {kinds[1]}", is_lost=True)
        return
    try:
        pair = [read_configuration(each, CONFIG_JSON).to_dict() for each in (ours, theirs)]
    except UsageError:  # not a text model of transformers
        pair = [ours, theirs]
    if differing := _differing(pair[0], pair[1], _OTHER_KEYS):
        yield Finding(CONFIG_JSON, f"differs from the base's in {first_of(differing)}")


def _differing(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], apart: Collection[str] = ()
) -> list[str]:
    names = sorted({*ours, *theirs}.difference(apart))
    return [name for name in names if ours.get(name) != theirs.get(name)]
