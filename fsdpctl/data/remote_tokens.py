"""Token files in object stores (s3://, gs:// and others of fsspec), of which samples are fetched.

Note: a sample is a function of its position, so the samples of the next steps are known, and all of
them are fetched at the same time, steps ahead. That hides the latency of a store, and nothing is
fetched that is not trained on. What tells the format (the first bytes of each file, and the files
next to it) is kept in the user's cache, in files of the same names and sizes.
"""

import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
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

_START = 4096  # bytes of a file that tell its format
_MOST_AHEAD = 1 << 14  # samples that are kept until they are used
_COMPLETE = "complete"
_VERSIONS = ("ETag", "etag", "LastModified", "mtime", "updated", "created")  # of drivers


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShard(TokenShard):
    """The tokens of a file in an object store; `path` is its description in the cache."""

    is_remote: ClassVar[bool] = True
    file: StoredFile
    version: str
    prefetched: dict[tuple[int, int], Future[bytes]] = field(default_factory=dict, compare=False)
    lock: Any = field(default_factory=Lock, compare=False)
    check_lock: Any = field(default_factory=Lock, compare=False)
    last_check: list[float] = field(default_factory=lambda: [0.0], compare=False)  # since the boot

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens, which may have been fetched before.

        FsdpctlError if the store does not answer after several attempts. UsageError if the file has
        changed since it was listed.
        """
        with self.lock:
            known = self.prefetched.pop((start, stop), None)
        failed = known is None or known.exception() is not None  # then, perhaps no longer
        content = self._get(start, stop) if known is None or failed else known.result()
        return np.frombuffer(content, dtype=self.dtype)

    def fetch(self, start: int, stop: int) -> None:
        with self.lock:
            if (start, stop) not in self.prefetched and len(self.prefetched) < _MOST_AHEAD:
                self.prefetched[start, stop] = POOL.submit(self._get, start, stop)

    def _get(self, start: int, stop: int) -> bytes:
        size = self.dtype.itemsize
        first, last = self.offset + start * size, self.offset + stop * size
        content = self.file.read(first, last)
        self._check()
        return content

    def _check(self) -> None:
        """Check that the file is the one that was listed, once for all that were fetched before."""
        fetched = time.monotonic()
        with self.check_lock:
            if self.last_check[0] > fetched:
                return
            began = time.monotonic()
            if _version(self.file.info()) != self.version:
                raise UsageError(f"{self.file.url}: changed since the run started")
            self.last_check[0] = began


def cache_descriptions(path: str, key: str) -> tuple[Path, dict[str, tuple[StoredFile, str]]]:
    """Return a directory with descriptions of the token files at a URL, and what each describes.

    The URL is that of a file or a directory, or a glob. Of a token file and its flags, a
    description has the size and the first bytes; the other files next to it are complete.
    UsageError if there are none, or if the driver of the store is missing.
    """
    store, files = _listed(path, key)
    bins = [url for url in files if url.endswith(TOKEN_SUFFIXES)]
    if not bins:
        raise UsageError(f"{key}={path}: no token files, of {', '.join(TOKEN_SUFFIXES)}")
    if outside := next((url for url in files if ".." in url.split("/")), None):
        raise UsageError(f"{key}={path}: {outside}: leads out of its directory")
    beside = {url for url in files if _belongs(url, set(bins))}
    listing = "\n".join(f"{url} {about}" for url, about in sorted(files.items()))
    root = os.path.commonpath([os.path.dirname(url) for url in bins])
    folder = cache_folder(f"remote-{xxhash.xxh3_128_hexdigest(f'{path}{listing}'.encode())}")

    def fetch(url: str) -> None:
        size, is_whole = files[url][0], url in beside and not url.endswith(LOSS_MASK_SUFFIX)
        most = size if is_whole else min(_START, size)
        places[url].copy_prefix(folder / os.path.relpath(url, root), most, size)

    wanted = [*bins, *sorted(beside)]
    places = {url: StoredFile(store, url, url) for url in wanted}
    if not (folder / _COMPLETE).exists():
        with doing(f"looking at {path}", "files", len(wanted)) as advance:
            for _ in POOL.map(fetch, wanted):
                advance(1)
        write_atomic(folder / _COMPLETE, "")
    here = {url: str(folder / os.path.relpath(url, root)) for url in wanted}
    return folder, {file: (places[url], files[url][1]) for url, file in here.items()}


def _belongs(url: str, bins: set[str]) -> bool:
    stem, suffix = os.path.splitext(url)
    return suffix in TOKEN_NEIGHBORS and (
        stem in bins or any(f"{stem}{x}" in bins for x in TOKEN_SUFFIXES)
    )


def _version(about: Mapping[str, Any]) -> str:
    """Return what tells that a file has changed, in one form for listings and single files."""
    found = next((about[each] for each in _VERSIONS if about.get(each) is not None), None)
    return str(found.timestamp() if isinstance(found, datetime) else found).strip('"')


def _listed(path: str, key: str) -> tuple[Any, dict[str, tuple[int, str]]]:
    place = open_store(path, f"{key}={path}")
    store, root = place.store, place.path
    is_glob = re.search(r"[*?\[]", root) is not None
    with doing(f"listing {path}"):
        if is_glob or with_retries(path, lambda: store.isfile(root), UsageError):
            folder = os.path.dirname(re.split(r"[*?\[]", root)[0])
            matches = (
                set(with_retries(path, lambda: store.glob(root), UsageError)) if is_glob else {root}
            )
        else:
            folder, matches = root, set[str]()
        depth = 1 if matches and not is_glob else None
        found = with_retries(
            path, lambda: store.find(folder, maxdepth=depth, detail=True), UsageError
        )
    files = {}
    for url, about in found.items():
        if about["type"] == "file" and (not matches or url in matches or _belongs(url, matches)):
            if about.get("size") is None:
                raise UsageError(f"{key}={path}: {url}: the store does not tell its size")
            files[url] = int(about["size"]), _version(about)
    return store, files
