"""Repositories of the Hugging Face Hub: their files in its cache, fetched by huggingface_hub."""

import fcntl
import glob
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsdpctl.errors import NO_ROOM, UsageError
from fsdpctl.io.activity import BYTES, DISPLAY, Advance, doing
from fsdpctl.io.texts import printable
from fsdpctl.io.units import format_bytes
from fsdpctl.io.untrusted import MIB

Choose = Callable[[Collection[str]], Collection[str]]


def hub_cache() -> Path:
    from huggingface_hub import constants  # takes 0.1 s, and few commands need it

    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE))


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the Hub; the library takes its address and a token from the environment."""

    name: str
    revision: str | None
    kind: str  # model or dataset
    where: str  # begins messages

    @property
    def folder(self) -> Path:
        return hub_cache() / f"{self.kind}s--{self.name.replace('/', '--')}"

    def snapshot(self) -> Path | None:
        """Return the directory of its files in the cache, which may lack some."""
        revision = self.revision or "main"
        if ".." in revision:
            return None
        reference = self.folder / "refs" / revision
        if reference.is_file():
            revision = reference.read_text().strip()
        found = self.folder / "snapshots" / revision
        return found if re.fullmatch(r"[\w.-]+", revision) and found.is_dir() else None

    def names(self) -> list[str]:
        """Return the names of all files that it has on the Hub, or none if that is unknown."""
        from huggingface_hub import errors, get_cached_repo_tree

        try:
            about: dict[str, Any] = {"repo_type": self.kind, "cache_dir": hub_cache()}
            return [each.path for each in get_cached_repo_tree(self.name, **about, **self._at())]
        except (errors.CachedRepoTreeNotFoundError, ValueError, OSError):
            return []

    def _at(self) -> dict[str, str | None]:
        found = self.snapshot()
        return {"revision": self.revision if found is None else found.name}

    @property
    def _absent(self) -> str:
        return "no such directory, and " if self.kind == "model" else ""

    def lacks(self, file: str) -> UsageError:
        """Return the error that the cache lacks a file where nothing may be fetched."""
        what = f"{file} is missing in the Hugging Face cache"
        if self.snapshot() is None:
            what = f"{self._absent}not in the Hugging Face cache ({hub_cache()})"
        kind = "" if self.kind == "model" else f"--repo-type {self.kind} "
        command = f"{kind}{self.name}{f' --revision {self.revision}' if self.revision else ''}"
        way = f"Where there is a network, run `hf download {command}`"
        return UsageError(f"{self.where}: {what}; HF_HUB_OFFLINE is set. {way}")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let one process of a machine fetch; the others wait, and look again."""
        lock = hub_cache() / ".locks" / self.folder.name / "fsdpctl.lock"
        with self._explained():
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        with file:
            waiting = f"waiting for another process that fetches {self.name}"
            with doing(waiting), suppress(OSError):  # a file system may have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def fetch(self, choose: Choose, *, dry: bool = False) -> list[str]:
        """Fetch the files that `choose` returns of all names; if dry, only print their size.

        Returns all names.

        Raises:
            UsageError: If there is no such repository, no access, or too little space.
        """
        from huggingface_hub import HfApi, snapshot_download

        about: dict[str, Any] = {"repo_type": self.kind, **self._at()}
        with self._explained():
            with doing(f"asking {_host()} for {self.name}"):
                HfApi().repo_info(self.name, **about)  # without a network, fails at once
                names = HfApi().list_repo_files(self.name, **about)
                chosen = [*map(glob.escape, choose(names))]
                about |= {"cache_dir": hub_cache(), "allow_patterns": chosen}
                asked = snapshot_download(self.name, dry_run=True, tqdm_class=_bar(), **about)
            files = [each for each in asked if each.will_download]
            size = sum(each.file_size or 0 for each in files)
            if size:
                self._announce("to fetch" if dry else "fetching", len(files), size)
            if not dry:
                with doing(f"fetching {self.name}", BYTES, size) as advance:
                    found = _stoppable(partial(snapshot_download, self.name, **about), advance)
                    Path(found).mkdir(parents=True, exist_ok=True)  # if there are no files
        return names

    def _announce(self, what: str, count: int, size: int) -> None:
        """Print what is fetched, and refuse what the disk has no space for."""
        above = next(each for each in (hub_cache(), *hub_cache().parents) if each.is_dir())
        free = shutil.disk_usage(above).free
        figures = f"{format_bytes(size)}, {format_bytes(free)} free in {hub_cache()}"
        if size > free:
            raise UsageError(f"{self.where}: {figures}; set HF_HOME to a directory with more space")
        files = "1 file" if count == 1 else f"{count} files"
        DISPLAY.tell(f"{what} {self.name}: {files}, {figures}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise what the library raises as a UsageError, without the URLs in its messages."""
        logger = logging.getLogger("huggingface_hub")
        before = logger.level
        logger.setLevel(logging.CRITICAL)  # its warnings quote signed URLs
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self.where}: {self._reason(error)}") from None
        finally:
            logger.setLevel(before)

    def _reason(self, error: BaseException) -> str:
        from huggingface_hub import errors

        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return f"no space left in {hub_cache()}; set HF_HOME to a directory with more"
        chain = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        known = next((each for each in chain if isinstance(each, errors.HfHubHTTPError)), error)
        host = _host()
        if isinstance(known, errors.GatedRepoError):
            return f"gated; ask for access on {host}/{self.name}, and set HF_TOKEN"
        if isinstance(known, errors.RevisionNotFoundError):
            return f"{self.name} has no such revision on {host}"
        if isinstance(known, errors.RepositoryNotFoundError):
            return f"{self._absent}no such {self.kind} on {host}; if it is private, set HF_TOKEN"
        if isinstance(known, errors.HfHubHTTPError):
            status = known.response.status_code
            return f"{host} answers {status}{'; check HF_TOKEN' if status in (401, 403) else ''}"
        if isinstance(error, OSError) and error.filename:
            return f"{error.filename}: {error.strerror}"
        kind = type(chain[-1]).__name__
        if self.snapshot() is None:
            return f"{self._absent}{host} cannot be reached ({kind})"
        return f"cannot be fetched from {host} ({kind}); complete files are kept, run it again"


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids to fetch."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _host() -> str:
    from huggingface_hub import constants

    return printable(urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2])


def _stoppable(fetch: Callable[..., str], advance: Advance) -> str:
    """Call `fetch` with a progress bar in a thread of its own.

    The threads of the library end when their bar raises an error, so a signal need not wait for
    the files.
    """
    from huggingface_hub import constants

    # What a cut loses, and what a signal waits for.
    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, MIB)
    stopped, pool = threading.Event(), ThreadPoolExecutor(1, thread_name_prefix="fetch")
    try:
        return pool.submit(fetch, tqdm_class=_bar(advance, stopped)).result()
    finally:
        stopped.set()
        pool.shutdown(wait=False)


def _bar(advance: Advance | None = None, stopped: Any = None) -> Any:
    """Return a class of progress bars that shows nothing, and tells `advance` of bytes on disk."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            init: Any = super().__init__
            init(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if stopped is not None and stopped.is_set():
                raise InterruptedError
            if advance is not None and self._counts:
                advance(int(n or 0))

    return Bar
