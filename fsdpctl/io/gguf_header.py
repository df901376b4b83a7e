"""The header of a GGUF file: type-checked metadata, and the positions of tensors."""

import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular
from fsdpctl.io.packages import import_package

GGUF_SUFFIX = ".gguf"
GGUF_CONFIG_JSON = "fsdpctl.config_json"  # in exports: the whole config.json
GGUF_TOKENIZER = "tokenizer.huggingface.json"  # the key of a tokenizer.json
GGUF_EMBEDDING, GGUF_TOKENS = "token_embd.weight", "tokenizer.ggml.tokens"
SPECIAL_TOKENS = ("bos", "eos", "unknown", "padding")
_MAX_DIMENSIONS = 4  # ggml's limit
# A list of numbers has only integers, or only floats.
_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "a whole number above 0": lambda value: type(value) is int and value > 0,
    "a whole number": lambda value: type(value) is int and value >= 0,
    "a number above 0": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "a text": lambda value: type(value) is str,
    "true or false": lambda value: type(value) is bool,
    "a list of texts": lambda value: type(value) is TextList,
    "a list of numbers": lambda value: type(value) is list and {*map(type, value)} < {int, float},
}
# The keys that fsdpctl reads, without the prefix of the architecture, by their expected type.
_KEYS = {
    "a whole number above 0": "general.alignment split.count context_length block_count vocab_size "
    "embedding_length feed_forward_length expert_feed_forward_length attention.head_count "
    "expert_shared_feed_forward_length attention.head_count_kv attention.key_length "
    "attention.value_length rope.dimension_count rope.scaling.original_context_length",
    "a whole number": "attention.sliding_window expert_count expert_used_count "
    + " ".join(f"tokenizer.ggml.{name}_token_id" for name in SPECIAL_TOKENS),
    "a number above 0": "attention.layer_norm_epsilon attention.layer_norm_rms_epsilon "
    "attention.scale attn_logit_softcapping final_logit_softcapping rope.freq_base "
    "rope.freq_base_swa rope.scaling.factor",
    "a text": "general.architecture rope.scaling.type tokenizer.ggml.model tokenizer.ggml.pre "
    f"tokenizer.chat_template {GGUF_TOKENIZER} {GGUF_CONFIG_JSON}",
    "true or false": "tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token "
    "tokenizer.ggml.add_space_prefix",
    "a list of texts": f"{GGUF_TOKENS} tokenizer.ggml.merges",
    "a list of numbers": "tokenizer.ggml.scores tokenizer.ggml.token_type",
}
_EXPECTED = {name: expected for expected, names in _KEYS.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class TextList:
    """A list of texts, of which only the length is read."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor, and the position of its bytes in the file."""

    name: str
    shape: tuple[int, ...]  # 1 to 4 dimensions, none empty
    kind: int  # ggml's number of the dtype
    start: int  # byte offset in the file
    row_bytes: int  # bytes of a row, which is the last dimension


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata, in which all keys that fsdpctl reads have valid types, and the tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key that is prefixed by the architecture."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


def is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and path.is_file()


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    UsageError if it is damaged, has a value of an invalid type, or only a part of a model.
    """
    os.close(open_regular(path, follow_links=True))
    import_package("gguf", str(path))
    from transformers.integrations.gguf import reader

    library: Any = reader
    try:
        content = library._mapped(str(path))
        metadata, num_tensors, position = _metadata(content, library)
        table, position = library._read_tensor_table(content, num_tensors, position)
        alignment = metadata.get("general.alignment", 32)
        tensors = _tensors(table, position, alignment, len(content))
    except Exception as error:  # the reader of transformers expects valid files
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{path}: not a complete GGUF file: {problem:.120}") from None
    header = GgufHeader(metadata, tensors)
    if problem := _problem(header):
        raise UsageError(f"{path}: {problem}")
    if (num_files := metadata.get("split.count", 1)) != 1:
        merge = "merge them with `llama-gguf-split --merge FIRST_FILE MERGED_FILE`"
        raise UsageError(f"{path}: one of {num_files} files of a model; {merge}")
    return header


def _metadata(content: Any, library: Any) -> tuple[dict[str, Any], int, int]:
    if bytes(content[:4]) != b"GGUF" or struct.unpack_from("<I", content, 4)[0] not in (2, 3):
        raise ValueError("expected version 2 or 3 of GGUF")
    num_tensors, num_keys = struct.unpack_from("<QQ", content, 8)
    metadata, position = dict[str, Any](), 24
    for _ in range(num_keys):
        name, position = library._read_string(content, position)
        (value_type,) = struct.unpack_from("<I", content, position)
        value, end = library._read_value(content, position + 4, value_type)
        # The reader returns the length of an array (type 9) of texts.
        is_text_list = value_type == 9 and isinstance(value, int)
        if name in metadata:
            raise ValueError(f"{name} appears twice")
        metadata[name], position = TextList(value) if is_text_list else value, end
    if "general.architecture" not in metadata:
        raise ValueError("general.architecture not found")
    return metadata, num_tensors, position


def _tensors(table: Any, position: int, alignment: Any, size: int) -> dict[str, GgufTensor]:
    import gguf

    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise ValueError(f"general.alignment={alignment}: expected a multiple of 8")
    sizes = {int(dtype): each for dtype, each in gguf.GGML_QUANT_SIZES.items()}
    begin, end, tensors = -(-position // alignment) * alignment, 0, dict[str, GgufTensor]()
    for name, shape, dtype, offset in sorted(table, key=lambda each: each[3]):
        if not 1 <= len(shape) <= _MAX_DIMENSIONS or 0 in shape:
            raise ValueError(f"{name} is empty, or has {len(shape)} dimensions")
        block_numel, block_bytes = sizes[dtype]
        row_bytes, remainder = divmod(shape[-1] * block_bytes, block_numel)
        if remainder or name in tensors or offset < end or offset % alignment:
            raise ValueError(f"{name} overlaps another tensor, or appears twice")
        end = offset + row_bytes * math.prod(shape[:-1])
        if begin + end > size:
            raise ValueError(f"{name} exceeds the file")
        tensors[name] = GgufTensor(name, shape, dtype, begin + offset, row_bytes)
    return tensors


def _problem(header: GgufHeader) -> str:
    metadata, tensors = header.metadata, header.tensors
    for name, value in metadata.items():
        expected = _EXPECTED.get(name.removeprefix(f"{header.architecture}."))
        if expected is not None and not _CHECKS[expected](value):
            text = f"a list of {len(value)}" if isinstance(value, list) else str(value)
            return f"{name}={text:.40}: expected {expected}"
    rows = tensors[GGUF_EMBEDDING].shape[0] if GGUF_EMBEDDING in tensors else None
    num_tokens = metadata[GGUF_TOKENS].count if GGUF_TOKENS in metadata else rows
    vocab_size = header.get("vocab_size", rows)
    if rows is not None and ((num_tokens or 0) > rows or vocab_size != rows):
        sizes = f"{num_tokens} tokens and vocab_size={vocab_size}"
        return f"{GGUF_EMBEDDING} has {rows} rows, for {sizes}"
    for name, value in metadata.items():
        if isinstance(value, list) and name in _EXPECTED and len(value) != num_tokens:
            return f"{name}: expected {num_tokens} numbers, got {len(value)}"
        if name.endswith("_token_id") and name in _EXPECTED and value >= (num_tokens or math.inf):
            return f"{name}={value}: expected a number below {num_tokens}"
    return ""
