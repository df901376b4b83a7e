"""Files of conversations: which ones, and how an epoch is made of them.

A hash of a conversation's content decides whether it is held out for validation and how often it is
repeated. New data therefore moves no conversation between training and validation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from fsdpctl.config.data import CHAT
from fsdpctl.config.data_files import DataFiles
from fsdpctl.config.sources import sources_in
from fsdpctl.data.files import find_data
from fsdpctl.errors import UsageError
from fsdpctl.io.files import open_regular

_CHUNK_BYTES = 1 << 22
_PART_SEED, _REPEAT_SEED = 1, 2  # makes the two decisions independent of each other


@dataclass(frozen=True, slots=True)
class ChatSource:
    """A file and its share of an epoch's conversations; None means all of its conversations.

    Files of one directory or glob have their share together.
    """

    path: str
    share: float | None = None
    group: str = ""  # the path that the user gave the share for


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """The files that a key names, and what it leaves out."""

    train: tuple[ChatSource, ...]
    validation: tuple[ChatSource, ...]  # found next to those of `train`
    found: tuple[tuple[str, DataFiles], ...]  # by path


def sources_of(text: str, key: str = "data.path") -> ChatFiles:
    """Return the files that a key names: PATH, or PATH,PATH, or FILE:SHARE,FILE:SHARE in brackets.

    A path is a file, a directory, or a glob; `data_files` selects their files. Those of a directory
    or glob are sorted. Shares are normalized to a sum of one.

    Raises:
        UsageError: If a file is missing, or if only some of the files have a share.
    """
    train, validation, found = list[ChatSource](), list[ChatSource](), []
    for source in sources_in(text, key):
        path, share = source.path, source.share
        if source.epochs is not None or source.given_name is not None:
            raise UsageError(f"{key}: {path}: names and epochs are only valid for text and tokens")
        files = find_data(path, key, CHAT)
        group = "" if share is None else path
        train += (ChatSource(str(each), share, group) for each in files.train)
        validation += (ChatSource(str(each)) for each in files.validation)
        found.append((path, files))
    return ChatFiles(tuple(train), tuple(validation), tuple(found))


def files_checksum(sources: Sequence[ChatSource]) -> str:
    """Return a checksum of the contents and shares of files."""
    digest = xxhash.xxh3_128()
    for source in sources:
        digest.update(f"{source.share!r};".encode())
        with open(open_regular(Path(source.path), follows=True), "rb") as file:
            size = 0
            while part := file.read(_CHUNK_BYTES):
                digest.update(part)
                size += len(part)
        digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()


def is_held_out(content: bytes, fraction: float) -> bool:
    """Return whether a conversation is in the `fraction` that is held out for validation."""
    return xxhash.xxh3_64_intdigest(content, seed=_PART_SEED) < int(fraction * (1 << 64))


def repeat_hash(content: bytes) -> int:
    """Return the hash by which the conversations of a file are ranked for one more repetition."""
    return xxhash.xxh3_64_intdigest(content, seed=_REPEAT_SEED)


def repeats(
    files: Sequence[NDArray[np.uint64]], shares: Sequence[float]
) -> list[NDArray[np.int64]]:
    """Return how often an epoch repeats each conversation of each file.

    The epoch has as many conversations as without shares.

    Args:
        files: The `repeat_hash` of each conversation, per file.
        shares: Each file's fraction of an epoch's conversations; the sum is one.

    Raises:
        UsageError: If a file has no conversations, or a share of less than one.
    """
    total = sum(map(len, files))
    found = []
    for hashes, share in zip(files, shares, strict=True):
        wanted = round(share * total)
        if not len(hashes) or not wanted:
            raise UsageError(
                f"data.path: a share of {share:.3g} of {total} conversations, of a file with "
                f"{len(hashes)} to train on, rounds to 0 conversations"
            )
        times, more = divmod(wanted, len(hashes))
        counts = np.full(len(hashes), times, dtype=np.int64)
        counts[np.argsort(hashes, kind="stable")[:more]] += 1
        found.append(counts)
    return found
