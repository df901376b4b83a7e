"""Token files in object stores (s3://, gs:// and others of fsspec), read sample by sample.

Note: the samples of the next steps follow from the position, so they are fetched concurrently and
steps ahead. This hides the latency of the store, and fetches only samples that are trained on. The
user's cache has a sparse file for each token file, with its name, size and first bytes, and copies
of the files next to the token files. Formats are detected from these files.
"""

import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import xxhash

from fsdpctl.config.data import LOSS_MASK_SUFFIX, TOKEN_NEIGHBORS, TOKEN_SUFFIXES
from fsdpctl.data.token_reads import TokenArray, TokenShard
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.files import cache_folder, write_atomic
from fsdpctl.io.stores import POOL, StoredFile, open_store, with_retries

START_BYTES = 4096  # bytes of a file that tell its format
_MAX_PREFETCHED = 1 << 14  # samples
_COMPLETE = "complete"
# Keys by which drivers of fsspec report the version of a file, most exact first.
_VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "updated", "created")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShard(TokenShard):
    """The tokens of a file in an object store; `path` is its URL."""

    is_remote: ClassVar[bool] = True
    file: StoredFile
    version: str
    prefetched: dict[tuple[int, int], Future[bytes]] = field(default_factory=dict, compare=False)
    lock: Any = field(default_factory=Lock, compare=False)  # guards `prefetched`
    check_lock: Any = field(default_factory=Lock, compare=False)  # guards `last_check`
    # Monotonic seconds of the last check of the version; a list, since the dataclass is frozen.
    last_check: list[float] = field(default_factory=lambda: [0.0], compare=False)

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens, which may be prefetched.

        FsdpctlError if the store does not answer after several attempts. UsageError if the file has
        changed since it was listed.
        """
        with self.lock:
            prefetch = self.prefetched.pop((start, stop), None)
        # `exception` waits. A prefetch that failed is repeated: the store may answer now.
        if prefetch is not None and prefetch.exception() is None:
            return np.frombuffer(prefetch.result(), dtype=self.dtype)
        return np.frombuffer(self._get(start, stop), dtype=self.dtype)

    def fetch(self, start: int, stop: int) -> None:
        with self.lock:
            if (start, stop) not in self.prefetched and len(self.prefetched) < _MAX_PREFETCHED:
                self.prefetched[start, stop] = POOL.submit(self._get, start, stop)

    def _get(self, start: int, stop: int) -> bytes:
        size = self.dtype.itemsize
        content = self.file.read(self.offset + start * size, self.offset + stop * size)
        self._check()
        return content

    def _check(self) -> None:
        """Check that the file has not changed; one check covers all reads that precede it."""
        read_end = time.monotonic()
        with self.check_lock:
            if self.last_check[0] > read_end:
                return
            check_start = time.monotonic()
            if _version(self.file.info()) != self.version:
                raise UsageError(f"{self.file.url}: changed since the run started")
            self.last_check[0] = check_start


def cache_descriptions(path: str, key: str) -> tuple[Path, dict[str, tuple[StoredFile, str]]]:
    """Write descriptions of the token files at a URL to the cache.

    The URL names a file, a directory or a glob. The description of a token file, or of its loss
    mask, is a sparse file with its size and first bytes; the other files next to it are copied.

    Returns the directory, and for each description the remote file and its version. UsageError if
    there are no token files, or if the driver of the store is not installed.
    """
    store, files = _listed(path, key)
    bins = [url for url in files if url.endswith(TOKEN_SUFFIXES)]
    if not bins:
        raise UsageError(f"{key}={path}: no token files, of {', '.join(TOKEN_SUFFIXES)}")
    if outside := next((url for url in files if ".." in url.split("/")), None):
        raise UsageError(f"{key}={path}: {outside}: leads out of its directory")
    neighbors = {url for url in files if _belongs(url, set(bins))}
    listing = "\n".join(f"{url} {about}" for url, about in sorted(files.items()))
    root = os.path.commonpath([os.path.dirname(url) for url in bins])
    folder = cache_folder(f"remote-{xxhash.xxh3_128_hexdigest(f'{path}{listing}'.encode())}")

    def fetch(url: str) -> None:
        size, copies_all = files[url][0], url in neighbors and not url.endswith(LOSS_MASK_SUFFIX)
        prefix_size = size if copies_all else min(START_BYTES, size)
        remote_files[url].copy_prefix(paths[url], prefix_size, size)

    urls = [*bins, *sorted(neighbors)]
    paths = {url: folder / os.path.relpath(url, root) for url in urls}
    remote_files = {url: StoredFile(store, url, url) for url in urls}
    if not (folder / _COMPLETE).exists():
        with doing(f"reading headers of {path}", "files", len(urls)) as advance:
            for _ in POOL.map(fetch, urls):
                advance(1)
        write_atomic(folder / _COMPLETE, "")
    return folder, {str(paths[url]): (remote_files[url], files[url][1]) for url in urls}


def _belongs(url: str, bins: set[str]) -> bool:
    stem, suffix = os.path.splitext(url)
    owners = {stem, *(f"{stem}{each}" for each in TOKEN_SUFFIXES)}
    return suffix in TOKEN_NEIGHBORS and not owners.isdisjoint(bins)


def _version(info: Mapping[str, Any]) -> str:
    """Return the version of a file, in the same form for listings and single files."""
    version = next((info[each] for each in _VERSION_KEYS if info.get(each) is not None), None)
    return str(version.timestamp() if isinstance(version, datetime) else version).strip('"')


def _listed(path: str, key: str) -> tuple[Any, dict[str, tuple[int, str]]]:
    """Return the store, and size and version of each matching or neighboring file, by URL."""
    target = open_store(path, f"{key}={path}")
    store, root = target.store, target.path
    is_glob = re.search(r"[*?\[]", root) is not None
    with doing(f"listing {path}"):
        if is_glob or with_retries(path, lambda: store.isfile(root), UsageError):
            folder = os.path.dirname(re.split(r"[*?\[]", root)[0])
            glob = partial(store.glob, root)
            matches = set(with_retries(path, glob, UsageError)) if is_glob else {root}
        else:
            folder, matches = root, set[str]()
        depth = 1 if matches and not is_glob else None
        find = partial(store.find, folder, maxdepth=depth, detail=True)
        listing = with_retries(path, find, UsageError)
    files = {}
    for url, info in listing.items():
        if info["type"] == "file" and (not matches or url in matches or _belongs(url, matches)):
            if info.get("size") is None:
                raise UsageError(f"{key}={path}: {url}: the store does not tell its size")
            files[url] = int(info["size"]), _version(info)
    return store, files
