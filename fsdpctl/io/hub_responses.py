"""Checks of responses of the Hugging Face Hub, and of names in its cache.

Note: huggingface_hub builds paths from commits, etags and hashes, sends the token to the URL of the
next page, waits as long as a response requests, and reads responses of any length into memory. It
only checks the names of downloads. So fsdpctl checks each response when its headers arrive, before
the library processes it.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fsdpctl.errors import UsageError
from fsdpctl.io.texts import MIB
from fsdpctl.io.untrusted import Count, read_json

COMMIT = re.compile(r"[0-9a-f]{40}")
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_ETAG = re.compile(r"[\w+=:~-][\w.+=:~-]{0,127}", re.ASCII)
# The path of a request about a repository. Group 1: a listing.
_API_PATH = re.compile(r"/api/(?:model|dataset)s/[^/]+/[^/]+(/tree/)?")
_XET_ROUTE, _ORIGIN = "x-xet-refresh-route", attrgetter("scheme", "host", "port")
# Limits that the real server never reaches: a page has 1,000 names in 0.3 MiB, a rate limit 300 s.
_MAX_BYTES = 256 * MIB  # decompressed, per response or listing
_MAX_PAGES = 2000  # per listing
_MAX_SECONDS = 60.0  # per response
_TIMEOUT = 20.0  # seconds without a byte, after which the library retries 5 times
MAX_SILENCE_S = 360.0  # seconds without a response or a part of a file
_MAX_NAME = 1000  # characters of a name with its directories


class HubError(UsageError):
    """A response against the Hub's protocol. The message follows the host's name."""


class _LfsObject(msgspec.Struct):
    oid: _Sha256


class _Entry(msgspec.Struct):
    path: str  # the only field that is read; the types of the others are checked
    size: Count = 0
    lfs: _LfsObject | None = None


class _Info(msgspec.Struct):
    sha: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{40}\Z")]


class _CachedFile(msgspec.Struct):
    size: Count
    lfs_sha256: _Sha256 | None = None


class _CachedListing(msgspec.Struct):
    files: dict[str, _CachedFile]


def is_relative_path(name: str) -> bool:
    """Return whether `name` is a relative path that stays below its directory."""
    return len(name) <= _MAX_NAME and all(
        each not in ("", ".", "..") and "\0" not in each and len(os.fsencode(each)) < 256
        for each in name.split("/")
    )


def cached_names(listing: Path) -> list[str]:
    """Return the names in a listing file of the cache; empty if the file does not exist.

    UsageError if the file is not a listing, or has a name outside its repository.
    """
    files = read_json(listing, _CachedListing).files if listing.is_file() else {}
    if outside := next((each for each in files if not is_relative_path(each)), None):
        raise UsageError(f"{listing}: {outside[:80]!r} is not a file of a repository; delete it")
    return list(files)


@contextmanager
def checked_responses(hub_url: str, timeout: float = _TIMEOUT) -> Iterator[list[int]]:
    """Check the requests and responses of huggingface_hub in the block.

    Yields a list with one number, which counts responses. Requests of the library raise HubError if
    a response violates the protocol or exceeds a limit. `timeout`: seconds without a byte.
    """
    import huggingface_hub
    from huggingface_hub.utils import _http

    factory, checks = _http._GLOBAL_CLIENT_FACTORY, _ResponseChecks(hub_url, timeout)

    def client() -> Any:
        http_client = factory()
        http_client.event_hooks["request"].append(checks.before)
        http_client.event_hooks["response"].append(checks.after)
        return http_client

    huggingface_hub.set_client_factory(client)
    try:
        yield checks.num_answers
    finally:
        huggingface_hub.set_client_factory(factory)


class _ResponseChecks:
    """The checks of the requests and responses of a download."""

    def __init__(self, hub_url: str, timeout: float = _TIMEOUT) -> None:
        self.num_answers, self._timeout = [0], timeout
        self._trusted_urls = (hub_url, "https://huggingface.co", "https://hf.co")
        self._pages = dict[str, int]()  # bytes before each page of a listing, by the page's URL

    def before(self, request: Any) -> None:
        if "authorization" in request.headers:
            self._check_host(request.url)
        if request.headers.get("accept-encoding") != "identity":
            request.headers["accept-encoding"] = "gzip"
        limits = request.extensions.get("timeout", {})
        limits.update({each: limits[each] or self._timeout for each in limits})

    def after(self, response: Any) -> None:
        self.num_answers[0] += 1
        request = response.request
        links = {name: each.get("url") for name, each in response.links.items()}
        for link in (links.get("next"), links.get("xet-auth"), response.headers.get(_XET_ROUTE)):
            if link is not None:
                self._check_host(request.url.join(link))
        _check_headers(response)
        api_path = _API_PATH.search(request.url.path)
        if response.status_code >= 400:
            response.close()
            response._content = b""  # the headers have the reason; do not read the body
        elif api_path and request.method == "GET" and not response.has_redirect_location:
            size = self._pages.get(str(request.url), 0)
            if not size:
                self._pages.clear()  # this page is the first of a listing
            response._content = _content(response, bool(api_path[1]), _MAX_BYTES - size)
            if (link := links.get("next")) is not None:
                following = str(request.url.join(link))
                if following in self._pages or len(self._pages) >= _MAX_PAGES:
                    raise HubError("does not end its list of files")
                self._pages[following] = size + len(response._content)

    def _check_host(self, url: Any) -> None:
        if _ORIGIN(url) not in {_ORIGIN(url.join(each)) for each in self._trusted_urls}:
            raise HubError(f"refers to another host, {url.host}")


def _check_headers(response: Any) -> None:
    """Check the headers from which huggingface_hub builds paths, decodes bytes or waits."""
    headers = response.headers
    commit, etag = headers.get("x-repo-commit"), headers.get("x-linked-etag", headers.get("etag"))
    if commit is not None and not COMMIT.fullmatch(commit):
        raise HubError(f"names a commit {commit[:80]!r}; expected 40 hexadecimal digits")
    is_named = response.request.method == "HEAD" and etag is not None
    if is_named and not _ETAG.fullmatch(etag.lstrip("W/").strip('"')):  # as huggingface_hub strips
        raise HubError(f"has the ETag {etag[:80]!r}; expected digits and letters")
    if (coding := headers.get("content-encoding", "identity")) not in ("identity", "gzip"):
        raise HubError(f"compresses by {coding[:80]}; expected gzip")
    wait = headers.get("retry-after", "")
    if wait.isdigit() and (len(wait) > 9 or int(wait) > MAX_SILENCE_S):
        raise HubError(f"answers {response.status_code}, with Retry-After {wait[:9]} s")


def _content(response: Any, is_listing: bool, max_bytes: int) -> bytes:
    content, end = bytearray(), time.monotonic() + _MAX_SECONDS
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > max_bytes:
            raise HubError(f"sends more than {_MAX_BYTES // MIB} MiB about a repository")
        if time.monotonic() > end:
            raise HubError(f"takes more than {_MAX_SECONDS:.0f} s for an answer")
    try:
        if not is_listing:
            msgspec.json.decode(content, type=_Info)
            return bytes(content)
        for entry in msgspec.json.decode(content, type=list[_Entry]):
            if not is_relative_path(entry.path):
                raise HubError(f"names a file {entry.path[:80]!r}, outside its repository")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HubError(f"does not answer like a Hub: {error}") from None
    return bytes(content)
