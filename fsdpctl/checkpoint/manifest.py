"""What a checkpoint consists of: the file that is written last and makes it complete."""

import json
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.spans import checksum
from fsdpctl.checkpoint.tensor_file import ITEMSIZES
from fsdpctl.config.model_path import FORMAT, MANIFEST
from fsdpctl.errors import CheckpointError

_VERSION = 2
_BLANK = "0" * 32

PARAMETER, BUFFER = "model", "buffer"  # kinds of tensors; other kinds are optimizer states


def tensor_key(kind: str, name: str) -> str:
    """How a tensor is called in files: its kind, then the parameter's name."""
    return f"{kind}/{name}"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of the checkpoint, as it must be."""

    size: int
    xxh3: str  # of all bytes; of a tensor file's header, which has those of the tensors


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor, however many files its spans lie in."""

    shape: list[int]
    dtype: str  # safetensors' name

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.numel * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run had come."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # samples consumed: the position in the data
    data_fingerprint: str = ""
    optimizer_step: int = 0  # of every parameter that `optimizer_steps` does not name
    optimizer_steps: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # the caller's own


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the tensors' bytes."""

    files: dict[str, FileInfo]  # of tensors
    attachments: dict[str, FileInfo]  # what came with the model, such as its tokenizer
    tensors: dict[str, TensorInfo]  # by key
    progress: Progress
    config: dict[str, str]  # the resolved configuration, as words
    versions: dict[str, str]
    world_size: int

    def to_json(self) -> str:
        """The contents of manifest.json; its checksum is that of the text with zeros in place."""
        content = {"format": FORMAT, "version": _VERSION, **asdict(self), "xxh3": _BLANK}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        before, _, after = text.rpartition(_BLANK)
        return before + checksum(text.encode()) + after


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: it is missing, damaged, or of a version this one does not know.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
        content = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: not a complete checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not the manifest of a checkpoint")
    if content.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: version {content.get('version')} of the format, where this fsdpctl reads "
            f"version {_VERSION}"
        )
    before, digest, after = text.rpartition(str(content.get("xxh3")))
    if not digest or checksum((before + _BLANK + after).encode()) != digest:
        raise CheckpointError(f"{path}: damaged: its checksum does not match")
    try:
        return _from_content(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def _from_content(content: dict[str, Any]) -> Manifest:
    return Manifest(
        {name: FileInfo(**each) for name, each in content["files"].items()},
        {name: FileInfo(**each) for name, each in content["attachments"].items()},
        {name: TensorInfo(**each) for name, each in content["tensors"].items()},
        Progress(**content["progress"]),
        content["config"],
        content["versions"],
        content["world_size"],
    )
