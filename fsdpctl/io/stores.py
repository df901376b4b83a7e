"""Files in object stores (s3://, gs://), asked several times if need be.

URLs may be settings of others, and fsspec has file systems that run code, connect anywhere, or
open files within files: only those of STORES are opened.
"""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io.activity import doing
from fsdpctl.io.files import Refusal
from fsdpctl.io.texts import printable, refuse_secret

STORES = ("s3", "gs", "file")  # protocols; a file:// is a path of this machine
_HUB = "hf://"  # names of data sets in a cache on this machine
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")
_THREADS = 64  # requests at the same time
_TRIES, _PAUSE = 7, 0.25  # attempts of a request; seconds after the first, then doubled
_FINAL = (FileNotFoundError, PermissionError)  # answers that another attempt does not change
POOL = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")


def is_remote(path: str, where: str = "") -> bool:
    """Return whether a path is in a store, as s3://BUCKET/NAME; UsageError for other URLs."""
    url = _URL.match(path)
    if url is None or path.startswith(_HUB):
        return False
    refuse_secret(path, where.removesuffix(path).rstrip(" =") or url[1])
    if url[1] in STORES and "::" not in path:
        return True
    if os.path.exists(path):
        return False
    raise UsageError(
        f"{where or path}: not supported; expected a local path, or a URL of s3:// or gs://"
    )


def open_store(url: str, where: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path there; `where` begins messages."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # takes 0.1 s

    if not is_remote(url, where):
        raise UsageError(f"{where}: not in an object store")
    try:
        store, path = url_to_fs(url)
    except Exception as error:  # some drivers connect now
        raise UsageError(f"{where}: {error}") from None
    return store, str(path)


def asked(url: str, ask: Callable[[], Any], refusal: Refusal = FsdpctlError) -> Any:
    """Return the answer of a store, or raise `refusal` from its error after several attempts."""
    for number in range(_TRIES):
        try:
            return ask()
        except Exception as error:  # drivers raise those of their libraries
            kind = "" if isinstance(error, EOFError) else f"{type(error).__name__}: "
            reason = printable(" ".join(f"{kind}{error}".split())[:200])
            if isinstance(error, _FINAL) or number == _TRIES - 1:
                raise refusal(f"{url}: {reason}") from error
        with doing(f"waiting for {urlsplit(url).netloc or 'the store'} ({reason:.80})"):
            time.sleep(_PAUSE * 2**number)
    raise AssertionError


def read_range(
    store: Any, path: str, span: tuple[int, int], url: str, refusal: Refusal = FsdpctlError
) -> bytes:
    """Return bytes of a file, as `asked`; an answer that is too short is asked for again."""
    start, stop = span

    def ask() -> bytes:
        found: bytes = store.cat_file(path, start=start, end=stop)
        if len(found) != stop - start:
            raise EOFError(f"cut at byte {start + len(found)}, or replaced")
        return found

    content: bytes = asked(url, ask, refusal)
    return content
