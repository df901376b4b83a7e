"""The files next to the weights of a model: tokenizer files, and the original config.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.pretrained import RUN_ASSETS, assets_beside, read_assets
from fsdpctl.config.schema import Config
from fsdpctl.data.chats.template import TEMPLATE_FILE
from fsdpctl.data.tokenizer import TOKENIZER_FILES
from fsdpctl.data.tokens import DataSet
from fsdpctl.io.documents import parse_json
from fsdpctl.io.files import replace

_GENERATION = "generation_config.json"


def collect_assets(config: Config, data: DataSet) -> dict[str, bytes]:
    """Return the files by name: those of the model, and those of the data's tokenizer."""
    path = config.model.path
    own = {} if path is None else assets_beside(Path(path))
    found = {name: content for name, content in own.items() if name not in TOKENIZER_FILES}
    if data.tokenizer.vocab_size == data.vocab_size:  # else the tokens may be of another one
        found |= data.tokenizer.files()
    if data.template is not None:
        found[TEMPLATE_FILE] = data.template.encode()
    if data.end_tokens:
        found[_GENERATION] = _ended_by(data.end_tokens, found.get(_GENERATION, b"{}"))
    return found


def _ended_by(tokens: Sequence[int], content: bytes) -> bytes:
    """Add the tokens that end generation to the content of generation_config.json.

    Without the token that ends an assistant message, generation would not stop after it.
    """
    config = parse_json(content, dict[str, Any], _GENERATION)
    known = ends_of({_GENERATION: content}, "the model")
    config["eos_token_id"] = [*tokens, *(each for each in known if each not in tokens)]
    return (json.dumps(config, indent=2) + "\n").encode()


def ends_of(files: Mapping[str, bytes], where: str) -> tuple[int, ...]:
    """Return the tokens that end generation, from the files of a model."""
    config = parse_json(files.get(_GENERATION, b"{}"), dict[str, Any], f"{where}: {_GENERATION}")
    value = config.get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return tuple(each for each in listed if isinstance(each, int))


def write_assets(run_dir: Path, assets: Mapping[str, bytes]) -> None:
    """Write the files to the run directory."""
    (run_dir / RUN_ASSETS).mkdir(exist_ok=True)
    for name, content in assets.items():
        replace(run_dir / RUN_ASSETS / name, content)


def read_run_assets(run_dir: Path) -> dict[str, bytes]:
    """Return the files that are in the run directory."""
    return read_assets(run_dir / RUN_ASSETS)
