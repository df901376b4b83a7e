"""The files of data: at a path, or by its name on the Hugging Face Hub in its cache."""

import re
from pathlib import Path

from fsdpctl.config.data import CHAT
from fsdpctl.config.data_files import DataFiles, data_files, kind_of, select_files
from fsdpctl.config.sources import is_remote
from fsdpctl.errors import UsageError
from fsdpctl.io.fetch import hub_cache as cache_folder

_HUB = "hf://"
_NAME = re.compile(
    r"hf://(?:datasets/)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w.-]+))?(?::(?P<config>[\w.-]+))?(?:/(?P<split>[\w.-]+))?"
)


def find_data(path: str, key: str = "data.path", option: str | None = None) -> DataFiles:
    """Return the files of `data_files`, or of a data set in the cache of the Hugging Face Hub."""
    if path.startswith(_HUB):
        return _hub_files(path, key, option)
    if is_remote(path, f"{key}={path}"):
        raise UsageError(f"{key}={path}: only data=tokens reads from object stores")
    return data_files(path, key, option)


def _hub_files(path: str, key: str, option: str | None) -> DataFiles:
    """Return the files of `hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]` in the cache.

    A configuration and a split are words in the names of files and their directories; without
    them, `select_files` decides.

    Raises:
        UsageError: If there are none. The message has the command to download them.
    """
    match, where = _NAME.fullmatch(path), f"{key}={path}"
    if match is None:
        raise UsageError(f"{where}: expected hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]")
    name, revision, *words = match.groups()
    at = f" --revision {revision}" if revision else ""
    fetch = f"run `hf download --repo-type dataset {name}{at}`"
    folder = cache_folder() / f"datasets--{name.replace('/', '--')}"
    if (snapshot := _snapshot(folder, revision or "main")) is None:
        raise UsageError(
            f"{where}: not in the Hugging Face cache ({cache_folder()}); fsdpctl downloads "
            f"nothing, {fetch}"
        )
    names = {each: each.relative_to(snapshot).as_posix() for each in sorted(snapshot.rglob("*"))}
    files = [
        file
        for file, name in names.items()
        if (kind_of(file) == CHAT or file.suffix == ".txt")
        and all(word is None or _has_word(name, word) for word in words)
    ]
    if not files:
        raise UsageError(f"{where}: no such files in {snapshot}; {fetch}")
    found = select_files(files, snapshot, where, option, is_folder=words == [None, None])
    used = (*found.train, *found.validation)
    missing = next((names[each] for each in used if not each.is_file()), None)
    if missing or (missing := _lacking([names[each] for each in used])):
        raise UsageError(f"{where}: {missing} is missing in the Hugging Face cache; {fetch}")
    return found


def _lacking(names: list[str]) -> str | None:
    """Return a file that is not there of those numbered as NAME-00007-of-00100."""
    for name in names:
        if match := re.fullmatch(r"(.*-)(\d{5})(-of-)(\d{5})(.*)", name):
            before, _, of, count, after = match.groups()
            for number in range(int(count)):
                other = f"{before}{number:05d}{of}{count}{after}"
                if other not in names:
                    return other
    return None


def _snapshot(folder: Path, revision: str) -> Path | None:
    reference = folder / "refs" / revision
    if reference.is_file():
        revision = reference.read_text().strip()
    found = folder / "snapshots" / revision
    return found if re.fullmatch(r"[\w.-]+", revision) and found.is_dir() else None


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?:^|[-_./]){re.escape(word)}(?:[-_./]|$)", name) is not None
