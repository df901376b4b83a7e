"""Formats of token files, detected by headers and neighboring files, or set by `data.format`."""

import os
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from msgspec import Meta

from fsdpctl.config.data import LOSS_MASK_SUFFIX, TOKEN_FORMATS, TOKEN_SUFFIXES, TOKENS
from fsdpctl.config.data_files import DataFiles, select_files
from fsdpctl.config.model import MAX_TOKENS
from fsdpctl.data.find_data import find_data
from fsdpctl.data.remote_tokens import START_BYTES, RemoteShard, cache_descriptions
from fsdpctl.data.token_reads import DocumentIndex, ShardTokens, TokenShard, file_stamp
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import BYTES, doing
from fsdpctl.io.files import open_regular, os_errors_as
from fsdpctl.io.stores import StoredFile, is_remote
from fsdpctl.io.untrusted import as_type, check_version, read_json

TOKEN_FILE_FORMAT = "fsdpctl-tokens", 1  # format and version in NAME.json
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_LLM_C_HEADER = 1024  # bytes
# By magic number and version: the dtype and the vocabulary of GPT-2, and of Llama 3.
_LLM_C = {(20240520, 1): ("uint16", 50257), (20240801, 7): ("uint32", 128256)}
_MEGATRON, _MEGATRON_HEADER = b"MMIDIDX\0\0", "<9sQBQQ"
_MEGATRON_DTYPES = {1: "|u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NUMPY = b"\x93NUMPY"
_CHUNK = 1 << 22  # tokens that are verified at a time
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The tokens in a file, and facts from its header."""

    shard: TokenShard
    format: str
    start_checksum: str  # checksum of the first bytes
    vocab_size: int | None = None
    tokenizer: str | None = None  # name
    tokenizer_xxh3: str | None = None  # checksum
    xxh3: str | None = None  # checksum of the tokens
    num_bytes: int | None = None  # bytes of the text
    hint: str = ""  # why ids seem to have another width, and what to set

    @property
    def size(self) -> int:
        return self.shard.count * self.shard.dtype.itemsize

    @property
    def is_local(self) -> bool:
        """Whether the whole file can be read in a reasonable time."""
        return not self.shard.is_remote


@dataclass(frozen=True, slots=True)
class _Header:
    """The contents of NAME.json."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: Annotated[int, Meta(ge=0, le=1 << 60)]
    vocab_size: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    num_bytes: Annotated[int, Meta(ge=0)] | None
    xxh3: str
    tokenizer: str
    tokenizer_xxh3: str  # `Tokenizer.checksum`


@dataclass(frozen=True, slots=True)
class _InspectedFile:
    """A token file of unknown format. Its errors name the setting and the file."""

    path: Path
    size: int
    stamp: tuple[int, int]
    start: bytes  # the first bytes
    names: Collection[str]  # names of all files in the directory
    location: str

    @property
    def start_checksum(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.start)

    def error(self, problem: str) -> UsageError:
        return UsageError(f"{self.location}: {problem}")

    def shard(
        self,
        dtype: Any,
        offset: int = 0,
        count: int | None = None,
        index: DocumentIndex | None = None,
    ) -> TokenShard:
        """Return the tokens after `offset` bytes; UsageError unless there are `count` whole ids."""
        dtype = np.dtype(dtype)
        num_tokens, rest = divmod(self.size - offset, dtype.itemsize)
        if rest or count not in (None, num_tokens):
            ids = "ids" if count is None else f"{count} ids"
            size = self.size - offset
            raise self.error(f"expected {ids} of {dtype.itemsize} bytes, got {size} bytes")
        if not num_tokens:
            raise self.error("contains no tokens")
        return TokenShard(self.path, dtype, num_tokens, offset, self.stamp, index)


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """The token files at a path, opened, in the order of their names."""

    train: list[TokenFile]
    validation: list[TokenFile]
    files: DataFiles


def open_token_files(
    path: str, key: str = "data.path", format_name: str = "auto", *, with_validation: bool = True
) -> TokenFiles:
    """Open the token files at a path: a file, a directory, or a glob.

    `with_validation`: also open the validation files next to the training files. UsageError if
    there are no token files, or if a file is damaged, has an unknown format, or has another
    tokenizer or vocabulary than the first file.
    """
    remote_files: dict[str, tuple[StoredFile, str]] = {}  # path in the cache; str: version
    if is_remote(path, f"{key}={path}"):
        folder, remote_files = cache_descriptions(path, key)
        is_folder = not (path.endswith(TOKEN_SUFFIXES) or _GLOB.search(path))
        local, location = [Path(each) for each in sorted(remote_files)], f"{key}={path}"
        data_files = select_files(local, folder, location, TOKENS, is_folder=is_folder)
    elif path.endswith(TOKEN_SUFFIXES) and not (_GLOB.search(path) or Path(path).exists()):
        raise UsageError(f"{key}={path}: no such token file; `fsdpctl tokenize` creates one")
    else:
        data_files = find_data(path, key, TOKENS)
    folders = {each.parent for each in data_files.files}
    for folder in () if Path(path).is_file() else folders:
        if busy := next(folder.glob("*.progress.json"), None):
            raise UsageError(f"{key}={path}: {busy.name}: `fsdpctl tokenize` has not finished")
    paths = [*data_files.files, *(data_files.validation if with_validation else ())]
    token_files = _open_all(paths, key, format_name)
    if remote_files:
        token_files = [replace(x, shard=_in_store(x.shard, remote_files)) for x in token_files]
    first = token_files[0]
    for other in token_files[1:]:
        for fact in ("vocab_size", "tokenizer_xxh3" if first.tokenizer_xxh3 else "tokenizer"):
            expected, got = (getattr(each, fact) or "unknown" for each in (first, other))
            if expected != got:
                problem = f"{fact}: expected {expected}, as in {first.shard.path}, got {got}"
                raise UsageError(f"{key}: {other.shard.path}: {problem}")
    unmasked = [each.shard.path for each in token_files if each.shard.loss_mask is None]
    if unmasked and len(unmasked) < len(token_files):
        problem = "not found; expected one next to every token file, or none"
        raise UsageError(f"{key}: {unmasked[0]}{LOSS_MASK_SUFFIX}: {problem}")
    count = len(data_files.files)
    return TokenFiles(token_files[:count], token_files[count:], data_files)


def check_tokens(file: TokenFile, vocab_size: int | None) -> None:
    """Read and verify all tokens; `vocab_size` is the model's.

    UsageError if a token isn't in the vocabulary, or if the checksum isn't that of the header.
    """
    tokens, digest, path = ShardTokens([file.shard]), xxhash.xxh3_64(), file.shard.path
    limit, hint = file.vocab_size or vocab_size or MAX_TOKENS, file.hint and f"; {file.hint}"
    with doing(f"checking {path}", BYTES, file.size) as advance:
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            digest.update(chunk.data)
            for position in (int(chunk.argmax()), int(chunk.argmin())):
                if not 0 <= chunk[position] < limit:
                    raise UsageError(
                        f"{path}: token {start + position}: expected less than {limit}, the size "
                        f"of the vocabulary, got {chunk[position]}{hint}"
                    )
            advance(chunk.nbytes)
    if file.xxh3 not in (None, digest.hexdigest()):
        raise UsageError(f"{path}: corrupted: the checksum differs from its header")


def _in_store(shard: TokenShard, remote_files: Mapping[str, tuple[StoredFile, str]]) -> RemoteShard:
    loss_mask = None if shard.loss_mask is None else _in_store(shard.loss_mask, remote_files)
    fields = shard.dtype, shard.count, shard.offset, shard.stamp, shard.index, loss_mask
    file, version = remote_files[str(shard.path)]
    return RemoteShard(Path(file.url), *fields, file=file, version=version)


def _open_all(paths: Sequence[Path], key: str, format_name: str) -> list[TokenFile]:
    names: dict[Path, frozenset[str]] = {}  # listed once: a directory may have 10,000 files
    for folder in {each.parent for each in paths}:
        with os_errors_as(f"{key}={folder}"):
            names[folder] = frozenset(os.listdir(folder))
    return [_open(each, names[each.parent], key, format_name) for each in paths]


def _open(path: Path, names: Collection[str], key: str, format_name: str) -> TokenFile:
    inspected = _inspect(path, names, key)
    format_name = _detect_format(inspected) if format_name == "auto" else format_name
    if not inspected.size:
        raise inspected.error("contains no tokens")
    token_file = _READERS[format_name](inspected)
    if f"{path.name}{LOSS_MASK_SUFFIX}" not in names:
        return token_file
    # datatrove writes loss masks in this form.
    mask_file = _inspect(Path(f"{path}{LOSS_MASK_SUFFIX}"), names, key)
    shard = replace(token_file.shard, loss_mask=mask_file.shard("u1", count=token_file.shard.count))
    checksum = f"{token_file.start_checksum} {mask_file.start_checksum}"
    return replace(token_file, shard=shard, start_checksum=checksum)


def _inspect(path: Path, names: Collection[str], key: str) -> _InspectedFile:
    descriptor = open_regular(path, follow_links=True)
    with open(descriptor, "rb") as file:
        status, start = os.fstat(descriptor), file.read(START_BYTES)
    return _InspectedFile(path, status.st_size, file_stamp(status), start, names, f"{key}={path}")


def _detect_format(file: _InspectedFile) -> str:
    path, stem = file.path, file.path.stem
    if f"{stem}.json" in file.names:
        return "fsdpctl"
    if f"{stem}.idx" in file.names:
        return "megatron"
    if path.suffix == ".ds" or f"{path.name}.index" in file.names:
        return "datatrove"
    if len(file.start) >= _LLM_C_HEADER and struct.unpack_from("<2i", file.start) in _LLM_C:
        return "llm.c"
    if file.start.startswith(_NUMPY):
        return "numpy"
    raise file.error(
        f"the header {path.with_suffix('.json').name} is missing; `fsdpctl tokenize` turns text "
        f"into a token file; for a token file of another program, set data.format="
        f"{'|'.join(TOKEN_FORMATS[1:])}, and model.vocab_size or data.tokenizer=DIR"
    )


def _fsdpctl(file: _InspectedFile) -> TokenFile:
    path = file.path.with_suffix(".json")
    content = read_json(path, dict[str, Any], follow_links=True)
    check_version(content, TOKEN_FILE_FORMAT, "the header of a token file", str(path), UsageError)
    header = as_type(content, _Header, str(path))
    dtype = TOKEN_DTYPES[header.dtype]
    if file.size != header.num_tokens * dtype.itemsize:
        expected = f"{header.num_tokens} tokens of {dtype.itemsize} bytes by its header"
        raise file.error(f"expected {expected}, got {file.size} bytes")
    facts = header.vocab_size, header.tokenizer, header.tokenizer_xxh3, header.xxh3
    return TokenFile(file.shard(dtype), "fsdpctl", file.start_checksum, *facts, header.num_bytes)


def _llm_c(file: _InspectedFile) -> TokenFile:
    if len(file.start) < _LLM_C_HEADER:
        raise file.error(f"truncated: expected a header of {_LLM_C_HEADER} bytes")
    magic, version, count = struct.unpack_from("<3i", file.start)
    if (magic, version) not in _LLM_C:
        raise file.error(f"not a file of llm.c: magic number {magic}, version {version}")
    dtype, vocab_size = _LLM_C[magic, version]
    shard = file.shard(TOKEN_DTYPES[dtype], _LLM_C_HEADER, count)
    return TokenFile(shard, "llm.c", file.start_checksum, vocab_size)


def _megatron(file: _InspectedFile) -> TokenFile:
    path = file.path.with_suffix(".idx")
    size = struct.calcsize(_MEGATRON_HEADER)
    with open(open_regular(path, follow_links=True), "rb") as index:
        start, index_size = index.read(size), os.fstat(index.fileno()).st_size
        if len(start) < size or not start.startswith(_MEGATRON):
            raise UsageError(f"{path}: not an index of Megatron")
        _, version, code, sequences, documents = struct.unpack(_MEGATRON_HEADER, start)
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise UsageError(f"{path}: version {version}, dtype {code}: not supported")
        # The header, int32 lengths of sequences, int64 positions of sequences in bytes, and the
        # int64 indices of the sequences that begin documents.
        pointers, documents_start = size + 4 * sequences, size + 12 * sequences
        if index_size < documents_start + 8 * documents or not sequences:
            raise UsageError(f"{path}: truncated, or without sequences")
        index.seek(size)
        lengths = np.frombuffer(index.read(4 * sequences), dtype="<i4")
        index.seek(documents_start)
        boundaries = np.frombuffer(index.read(8 * documents), dtype="<i8").tolist()
    if (lengths < 0).any():
        raise UsageError(f"{path}: damaged: a length below 0")
    if boundaries[:1] != [0] or boundaries[-1] != sequences or boundaries != sorted(boundaries):
        raise UsageError(f"{path}: damaged: its documents do not have {sequences} sequences")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    document_index = DocumentIndex(
        path, offset=pointers, count=sequences, scale=dtype.itemsize,
        selection=(documents_start, documents),
    )  # fmt: skip
    shard = file.shard(dtype, count=int(lengths.sum(dtype=np.int64)), index=document_index)
    return TokenFile(shard, "megatron", file.start_checksum)


def _datatrove(file: _InspectedFile) -> TokenFile:
    path, metadata_path = Path(f"{file.path}.index"), Path(f"{file.path}.metadata")
    with open(open_regular(path, follow_links=True), "rb") as index:
        size = os.fstat(index.fileno()).st_size
        index.seek(max(0, size - 8))
        last = index.read(8)
    if size % 8 or not size:
        raise UsageError(f"{path}: truncated: expected whole numbers of 8 bytes")
    (count,) = struct.unpack("<Q", last)
    width = file.size // count if count else 0
    if width not in (2, 4) or file.size != count * width:
        raise file.error(f"expected {count} tokens by {path.name}, got {file.size} bytes")
    name = None
    if metadata_path.exists():
        with open(open_regular(metadata_path, follow_links=True), "rb") as metadata:
            line = metadata.readline(4096).decode("utf-8", "replace").strip()
        name = line.rpartition("|")[0] or line  # NAME|BYTES_PER_ID, or NAME
    index_of_ends = DocumentIndex(path, offset=0, count=size // 8, scale=1)
    shard = file.shard(f"<u{width}", count=count, index=index_of_ends)
    name = None if name == "Unknown Tokenizer" else name
    return TokenFile(shard, "datatrove", file.start_checksum, tokenizer=name)


def _numpy(file: _InspectedFile) -> TokenFile:
    with open(open_regular(file.path, follow_links=True), "rb") as content:
        try:
            version = np.lib.format.read_magic(content)
            readers = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
            shape, _, dtype = readers[version != (1, 0)](content)
        # NumPy calls Python's parser for the header, which raises arbitrary exceptions.
        except Exception as error:
            raise file.error(f"not an array of NumPy: {str(error):.100}") from None
        offset = content.tell()
    if len(shape) != 1 or dtype.kind not in "ui" or not dtype.isnative:
        raise file.error(f"expected a 1-D array of whole numbers, got {dtype} of shape {shape}")
    return TokenFile(file.shard(dtype, offset, shape[0]), "numpy", file.start_checksum)


def _raw(file: _InspectedFile, name: str) -> TokenFile:
    if file.start.startswith(_NUMPY):
        raise file.error(f"data.format={name}: has a header of NumPy; set data.format=auto")
    shard = file.shard(TOKEN_DTYPES[name])
    return TokenFile(shard, name, file.start_checksum, hint=_hint(file.start, shard.dtype))


def _hint(start: bytes, dtype: np.dtype[Any]) -> str:
    ids, size = np.frombuffer(start[: len(start) // 8 * 8], dtype), dtype.itemsize
    is_small = ids < 4  # as every second number, if an id has twice the bytes: its upper half
    if len(ids) < 64:
        return ""
    if is_small[1::2].mean() > 0.99 and is_small[::2].mean() < 0.9:
        next_step = "set data.format=uint32" if size == 2 else "convert them to uint32"
        problem = f"nearly every second id is 0: the ids probably have {2 * size} bytes"
        return f"{problem}; {next_step}"
    if np.median(ids) >= 1 << 20:  # more than the size of any vocabulary
        return "most ids exceed a million: the ids probably have 2 bytes; set data.format=uint16"
    return ""


_READERS: dict[str, Callable[[_InspectedFile], TokenFile]] = {
    "fsdpctl": _fsdpctl, "llm.c": _llm_c, "megatron": _megatron, "datatrove": _datatrove,
    "numpy": _numpy, **{name: partial(_raw, name=name) for name in TOKEN_DTYPES},
}  # fmt: skip
