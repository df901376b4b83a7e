"""Files in object stores (s3://, gs://), with retries.

Only the protocols in STORES are opened: URLs may come from other people's settings, and fsspec has
file systems that run code, connect to any host, or open files within files.
"""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.files import ErrorType, open_atomic
from fsdpctl.io.packages import install_hint
from fsdpctl.io.texts import printable, refuse_credentials

STORES = ("s3", "gs", "file")  # protocols; file:// is a path on this machine
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs"}
_HUB = "hf://"  # names of data sets, which are read from the Hub's cache on this machine
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")
_THREADS = 64  # concurrent requests
_ATTEMPTS = 7  # per request
_FIRST_PAUSE = 0.25  # seconds, doubled after each attempt
_NOT_RETRIED = (FileNotFoundError, PermissionError)
T = TypeVar("T")
POOL = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")


def is_remote(path: str, location: str = "") -> bool:
    """Return whether a path is a URL such as s3://BUCKET/NAME; UsageError for other URLs."""
    url = _URL.match(path)
    if url is None or path.startswith(_HUB):
        return False
    # The location may be `key=path`: its message must not print credentials of the path.
    refuse_credentials(path, location.removesuffix(path).rstrip(" =") or url[1])
    if url[1] in STORES and "::" not in path:
        return True
    if os.path.exists(path):
        return False
    problem = "not supported; expected a local path, or a URL of s3:// or gs://"
    raise UsageError(f"{location or path}: {problem}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file or directory in a store."""

    store: Any
    url: str  # as users write it
    path: str  # as the store expects it
    error_type: ErrorType = FsdpctlError  # raised if the store does not answer

    def child(self, name: str) -> "StoredFile":
        url, path = f"{self.url}/{name}", f"{self.path}/{name}"
        return StoredFile(self.store, url, path, self.error_type)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of bytes. An answer that is too short is requested again."""

        def request() -> bytes:
            content: bytes = self.store.cat_file(self.path, start=start, end=stop)
            if len(content) != stop - start:
                raise EOFError(f"truncated at byte {start + len(content)}, or replaced")
            return content

        return with_retries(self.url, request, self.error_type)

    def copy_prefix(self, file: Path, prefix_bytes: int, file_bytes: int) -> None:
        """Write the first `prefix_bytes` to a sparse local file of size `file_bytes`."""
        content = self.read(0, prefix_bytes)
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(file) as out:
            out.write(content)
            out.truncate(file_bytes)

    def info(self) -> dict[str, Any]:
        self.store.invalidate_cache(self.path)
        request: Callable[[], dict[str, Any]] = partial(self.store.info, self.path)
        return with_retries(self.url, request, self.error_type)

    def size(self) -> int:
        return int(self.info()["size"] or 0)

    def exists(self) -> bool:
        try:
            self.info()
        except FsdpctlError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    def remove(self, *, recursive: bool = False) -> None:
        try:
            with_retries(self.url, lambda: self.store.rm(self.path, recursive=recursive))
        except FsdpctlError:
            if self.exists():
                raise


def open_store(url: str, location: str, error_type: ErrorType = FsdpctlError) -> StoredFile:
    """Return the file or directory at a URL, with its file system of fsspec.

    UsageError, which begins with `location`, if the driver is missing or can't open the URL.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # takes 0.1 s

    if not is_remote(url, location):
        raise UsageError(f"{location}: not in an object store")
    try:
        store, path = url_to_fs(url)
    except ImportError as error:
        # fsspec's error has the driver's error as its cause.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        driver = _DRIVERS[url.partition(":")[0]]
        raise UsageError(f"{location}: {install_hint(driver, cause)}") from None
    except Exception as error:  # some drivers already connect here
        raise UsageError(f"{location}: {error}") from None
    return StoredFile(store, url, str(path), error_type)


def with_retries(url: str, request: Callable[[], T], error_type: ErrorType = FsdpctlError) -> T:
    """Return the result of `request`, or raise an `error_type`, whose cause is the driver's error.

    A missing or forbidden file fails at once, other requests after several attempts.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return request()
        except Exception as error:  # drivers raise arbitrary exceptions of their libraries
            kind = "" if isinstance(error, EOFError) else f"{type(error).__name__}: "
            reason = printable(" ".join(f"{kind}{error}".split())[:200])
            if isinstance(error, _NOT_RETRIED) or attempt == _ATTEMPTS - 1:
                raise error_type(f"{url}: {reason}") from error
        with doing(f"waiting for {urlsplit(url).netloc or 'the store'} ({reason:.80})"):
            time.sleep(_FIRST_PAUSE * 2**attempt)
    raise AssertionError  # unreachable, for mypy
