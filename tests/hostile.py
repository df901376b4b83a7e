"""Checkpoints, model directories and token files, and malicious versions of them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.comm.collectives import Collectives
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import to_settings
from fsdpctl.data.tokenizer import ByteTokenizer
from fsdpctl.io.checksummed_json import checksummed
from fsdpctl.io.run_files import MANIFEST
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_model
from tests.data.token_file import write_token_file

TINY_MODEL = [
    "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_heads=4", "model.num_kv_heads=2", "model.vocab_size=256", "precision=fp32",
    "data.tokenizer=bytes",
]  # fmt: skip
RANK_FILE = "rank-00000.safetensors"


def make_checkpoint(folder: Path, *args: str) -> Path:
    """Write a checkpoint of a tiny model with a tokenizer; `args` are settings of its run."""
    config = stored_config(compose_config([*TINY_MODEL, *args]).config)
    model = make_model(config, torch.device("cpu"))
    options = CheckpointMetadata(Progress(1), to_settings(config), ByteTokenizer().files())
    write_checkpoint(folder, take_snapshot(model, None, 0, options), Collectives())
    return folder


def make_hugging_face(checkpoint: Path, folder: Path) -> Path:
    """Export a checkpoint as a Hugging Face directory of several files."""
    consolidate(CheckpointReader(checkpoint), folder, max_file_bytes=20_000)
    return folder


def make_tokens(path: Path) -> Path:
    """Write a token file of bytes."""
    tokens = np.tile(np.arange(97, 117, dtype=np.uint16), 1000)
    write_token_file(path, tokens, ByteTokenizer(), num_bytes=len(tokens))
    return path


def reseal(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and refit its checksum."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    for name in ("format", "version", "xxh3"):
        del content[name]
    change(content)
    (checkpoint / MANIFEST).write_text(checksummed(content))


def read_header(file: Path) -> tuple[bytes, bytes]:
    """Return the JSON header of a safetensors file, and the data after it."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return content[8 : 8 + length], content[8 + length :]


def rewrite_header(file: Path, text: bytes) -> None:
    """Replace the header and keep the tensors."""
    _, data = read_header(file)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refit_header(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of the first rank's file, and refit the manifest."""
    text, _ = read_header(checkpoint / RANK_FILE)
    content = json.loads(text)
    change(content)
    write_refitted(checkpoint, json.dumps(content).encode())


def write_refitted(checkpoint: Path, text: bytes) -> None:
    """Write the header of the first rank's file as it is, and refit the manifest."""
    file = checkpoint / RANK_FILE
    rewrite_header(file, text)
    options = {
        "size": file.stat().st_size,
        "xxh3": xxhash.xxh3_128_hexdigest(struct.pack("<Q", len(text)) + text),
    }
    reseal(checkpoint, lambda content: content["files"].update({RANK_FILE: options}))


def attach(checkpoint: Path, name: str, content: bytes) -> None:
    """Add an attachment to the manifest, with its file at `name`."""
    file = checkpoint / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    options = {"size": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}
    reseal(checkpoint, lambda manifest: manifest["attachments"].update({name: options}))


def everything_in(folder: Path) -> dict[str, bytes | None]:
    """Return the paths below a directory with the contents of files."""
    return {
        str(each.relative_to(folder)): each.read_bytes() if each.is_file() else None
        for each in folder.rglob("*")
        if not each.is_fifo()
    }
