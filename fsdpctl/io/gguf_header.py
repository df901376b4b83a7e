"""The header of a GGUF file, read by transformers: its metadata and where its tensors are."""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular

SUFFIX = ".gguf"
OWN_CONFIG = "fsdpctl.config_json"  # of exports: all of config.json, beyond the format's keys


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor, and the place of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml's number of its dtype
    start: int
    row_bytes: int  # of the elements that the last dimension numbers


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata, of whose lists of texts only the lengths are kept, and the tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def read_header(path: Path) -> GgufHeader:
    """Read the header of a complete GGUF file.

    Raises:
        UsageError: If the file is damaged, or one of several that a model is split into.
    """
    os.close(open_regular(path, follows=True))
    try:
        import gguf
    except ImportError:
        raise UsageError(f"{path}: gguf not installed; run `pip install gguf`") from None
    from transformers.integrations.gguf import reader

    theirs: Any = reader
    sizes = {int(kind): each for kind, each in gguf.GGML_QUANT_SIZES.items()}
    try:
        content = theirs._mapped(str(path))
        metadata, count, place = theirs._read_metadata(content, "it")
        table, place = theirs._read_tensor_table(content, count, place)
        alignment = metadata.get("general.alignment", 32)
        begin, tensors = -(-place // alignment) * alignment, {}
        for name, shape, kind, offset in table:
            elements, size = sizes[kind]
            row_bytes, rest = divmod(shape[-1] * size, elements)
            if (
                rest
                or name in tensors
                or begin + offset + row_bytes * prod(shape[:-1]) > len(content)
            ):
                raise ValueError(f"{name} exceeds the file, or is in it twice")
            tensors[name] = GgufTensor(name, shape, kind, begin + offset, row_bytes)
    except Exception as error:  # of code that expects complete files
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{path}: not a complete GGUF file: {problem:.120}") from None
    if (parts := metadata.get("split.count", 1)) != 1:
        merge = "merge them with `llama-gguf-split --merge FIRST_FILE MERGED_FILE`"
        raise UsageError(f"{path}: one of {parts} files of a model; {merge}")
    return GgufHeader(metadata, tensors)
