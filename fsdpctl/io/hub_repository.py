"""Repositories of the Hugging Face Hub: their files in the cache, and downloads into it."""

import fcntl
import glob
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsdpctl.errors import DISK_FULL, UsageError
from fsdpctl.io.activity import BYTES, DISPLAY, Advance, doing
from fsdpctl.io.files import open_nofollow, read_text_file
from fsdpctl.io.hub_responses import (
    COMMIT,
    MAX_SILENCE_S,
    HubError,
    cached_names,
    checked_responses,
    is_relative_path,
)
from fsdpctl.io.texts import MIB, format_bytes, printable

Choose = Callable[[Collection[str]], Collection[str]]
T = TypeVar("T")
_SLACK = 64 * MIB  # reserve for files of unknown size and restarted downloads
_CHUNK = MIB // 4  # bytes between two checks for a stop; an interrupted download loses one chunk
_MORE_SPACE = "set HF_HOME to a directory with more space"
# Base classes of the errors that libraries raise without a network.
_NO_NETWORK = {"NetworkError", "TimeoutException", "ProxyError", "OfflineModeIsEnabled"}


def hub_cache() -> Path:
    from huggingface_hub import constants  # takes 0.1 s, and few commands need it

    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE))


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the Hub, whose address and token huggingface_hub reads from variables."""

    name: str
    revision: str | None
    kind: str  # model or dataset
    location: str  # messages begin with it
    is_upload: bool = False  # whether the repository is the target of an upload

    def __post_init__(self) -> None:
        if self.revision and not is_relative_path(self.revision):
            raise UsageError(f"{self.location}: {self.revision} is not a revision")

    @property
    def folder(self) -> Path:
        return hub_cache() / f"{self.kind}s--{self.name.replace('/', '--')}"

    def snapshot(self) -> Path | None:
        """Return the directory of the files in the cache, which may be incomplete; None: no files.

        UsageError if a link in the cache leads out of the repository.
        """
        commit = self.revision or "main"
        reference = self.folder / "refs" / commit
        if reference.is_file():
            commit = read_text_file(reference).strip()
            if not COMMIT.fullmatch(commit):
                raise UsageError(f"{reference}: not a commit; delete it")
        folder = self.folder / "snapshots" / commit
        if not COMMIT.fullmatch(commit) or not folder.is_dir():
            return None
        real = os.path.realpath(folder)
        if real != os.path.join(os.path.realpath(self.folder), "snapshots", commit):
            raise UsageError(f"{folder}: links to {real}, outside its repository; delete it")
        return folder

    def names(self) -> list[str]:
        """Return the names of all files on the Hub, as listed in the cache; empty if unknown."""
        snapshot = self.snapshot()
        return self._listed(snapshot.name) if snapshot else []

    def _listed(self, commit: str) -> list[str]:
        return cached_names(self.folder / "trees" / f"{commit}.json")

    @property
    def _not_local(self) -> str:  # a model's name may also be a path
        return "no such directory, and " if self.kind == "model" and not self.is_upload else ""

    def missing_error(self, file: str) -> UsageError:
        problem = f"{file} is missing in the Hugging Face cache"
        if self.snapshot() is None:
            problem = f"{self._not_local}not in the Hugging Face cache ({hub_cache()})"
        variable = "HF_HUB_OFFLINE" if "HF_HUB_OFFLINE" in os.environ else "TRANSFORMERS_OFFLINE"
        options = "" if self.kind == "model" else f"--repo-type {self.kind} "
        arguments = f"{options}{self.name}{f' --revision {self.revision}' if self.revision else ''}"
        next_step = f"On a machine with network access, run `hf download {arguments}`"
        return UsageError(f"{self.location}: {problem}; {variable} is set. {next_step}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process of this machine downloads the repository, and lock it."""
        lock = hub_cache() / ".locks" / self.folder.name / "fsdpctl.lock"
        with self.hub_errors():
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = open_nofollow(lock, "ab")
        with file:
            waiting = f"waiting for another process that fetches {self.name}"
            with doing(waiting), suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def fetch(self, choose: Choose, *, dry_run: bool = False) -> list[str]:
        """Download the files whose names `choose` selects; if `dry_run`, only print their size.

        Returns the names of all files. UsageError if the repository is not found or not accessible,
        or if the disk has too little space.
        """
        from huggingface_hub import HfApi, constants, snapshot_download

        constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, _CHUNK)
        snapshot = self.snapshot()
        revision = snapshot.name if snapshot else self.revision
        request: dict[str, Any] = {"repo_type": self.kind, "revision": revision}

        def request_files() -> tuple[list[str], dict[str, Any], list[Any]]:
            # Without a network, this first request fails at once.
            commit = str(HfApi().repo_info(self.name, **request).sha)
            self._listed(commit)  # raises if the cached listing is invalid
            names = HfApi().list_repo_files(self.name, **request)
            chosen = [*map(glob.escape, choose(names))]
            download = {**request, "cache_dir": hub_cache(), "allow_patterns": chosen}
            bar = _progress_bar_class()
            entries = snapshot_download(self.name, dry_run=True, tqdm_class=bar, **download)
            return names, download, [each for each in entries if each.will_download]

        with self.hub_errors(), checked_responses(constants.ENDPOINT) as num_answers:
            with doing(f"asking {hub_host()} for {self.name}"):
                names, download, files = _call_in_thread(request_files, num_answers)
            size = sum(each.file_size or 0 for each in files)
            if size:
                self._announce("to fetch" if dry_run else "fetching", len(files), size)
            if not dry_run:
                with doing(f"fetching {self.name}", BYTES, size) as advance:
                    stopped = threading.Event()
                    bar = _progress_bar_class(advance, stopped, num_answers, size)
                    fetch = partial(snapshot_download, self.name, tqdm_class=bar, **download)
                    try:
                        folder = _call_in_thread(fetch, num_answers)
                    finally:
                        stopped.set()
                    Path(folder).mkdir(parents=True, exist_ok=True)  # missing without files
        return names

    def _announce(self, verb: str, count: int, size: int) -> None:
        above = next(each for each in (hub_cache(), *hub_cache().parents) if each.is_dir())
        free = shutil.disk_usage(above).free
        figures = f"{format_bytes(size)}, {format_bytes(free)} free in {hub_cache()}"
        if size > free:
            raise UsageError(f"{self.location}: {figures}; {_MORE_SPACE}")
        files = "1 file" if count == 1 else f"{count} files"
        DISPLAY.print_line(f"{verb} {self.name}: {files}, {figures}")

    @contextmanager
    def hub_errors(self) -> Iterator[None]:
        """Convert errors of huggingface_hub to UsageErrors without URLs."""
        logger = logging.getLogger("huggingface_hub")
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # warnings of the library quote signed URLs
        try:
            yield
        except HubError as error:
            raise UsageError(f"{self.location}: {hub_host()} {error}") from None
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self.location}: {self._reason(error)}") from None
        finally:
            logger.setLevel(level)

    def _reason(self, error: BaseException) -> str:
        from huggingface_hub import errors

        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return f"no space left in {hub_cache()}; {_MORE_SPACE}"
        chain = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        http = next((each for each in chain if isinstance(each, errors.HfHubHTTPError)), error)
        host = hub_host()
        if isinstance(http, errors.GatedRepoError):
            return f"gated; ask for access on {host}/{self.name}, and set HF_TOKEN"
        if isinstance(http, errors.RevisionNotFoundError):
            return f"{self.name} has no such revision on {host}"
        if isinstance(http, errors.RepositoryNotFoundError):
            return f"{self._not_local}no such {self.kind} on {host}; if it is private, set HF_TOKEN"
        if isinstance(http, errors.HfHubHTTPError):
            status = http.response.status_code
            return f"{host} answers {status}{'; check HF_TOKEN' if status in (401, 403) else ''}"
        if isinstance(error, OSError) and error.filename:
            return f"{error.filename}: {error.strerror}; set HF_HOME to a directory you can write"
        error_name = type(chain[-1]).__name__
        if self.is_upload:
            return f"the connection to {host} broke ({error_name}); run it again"
        if _NO_NETWORK.isdisjoint(base.__name__ for x in chain for base in type(x).__mro__):
            return f"{host} does not answer like a Hub ({error_name})"
        if self.snapshot() is None:
            return f"{self._not_local}{host} cannot be reached ({error_name})"
        problem = f"cannot be fetched from {host} ({error_name})"
        return f"{problem}; complete files are kept, run it again"


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def hub_host() -> str:
    from huggingface_hub import constants

    return printable(urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2])


def _call_in_thread(work: Callable[[], T], num_answers: list[int]) -> T:
    """Call `work` in a thread; raise HubError if nothing arrives for MAX_SILENCE_S.

    `num_answers` has one number, which the thread increases. A signal interrupts only the caller,
    which then sets `stopped`: progress bars raise in the threads of huggingface_hub, which end.
    """
    results, errors = list[T](), list[BaseException]()

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="fetch", daemon=True)
    thread.start()
    while thread.is_alive():
        before = num_answers[0]
        thread.join(MAX_SILENCE_S)
        if thread.is_alive() and num_answers[0] == before:
            raise HubError(f"has sent nothing for {MAX_SILENCE_S:.0f} s")
    if errors:
        raise errors[0]
    return results[0]


def _progress_bar_class(
    advance: Advance | None = None, stopped: Any = None, num_answers: Any = None, size: int = 0
) -> Any:
    """Return a class of invisible progress bars that pass received bytes to `advance`.

    A bar raises HubError if many more bytes arrive than the announced `size`.
    """
    from huggingface_hub.utils.tqdm import tqdm

    total = [0]

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            init: Any = super().__init__
            init(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if stopped is not None and stopped.is_set():
                raise InterruptedError
            if advance is not None and self._counts:
                num_answers[0] += 1
                total[0] += int(n or 0)
                advance(int(n or 0))
                if total[0] > 2 * size + _SLACK:
                    raise HubError(f"sends more than the {format_bytes(size)} that it announced")

    return Bar
