"""The files of a data set: at a local path, or by a name on the Hugging Face Hub.

Note: fsdpctl does not use the library `datasets`, because it opens any path and URL that a card
names, stores a second copy of the data, and sends requests to the Hub at each start.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from fsdpctl.config.data import CHAT, TEXT, DataConfig
from fsdpctl.config.data_files import DataFiles, kind_of_file, local_data_files, select_files
from fsdpctl.errors import UsageError
from fsdpctl.io.files import check_inside, nearest_path_hint, read_regular
from fsdpctl.io.hub_repository import Repository, is_offline
from fsdpctl.io.stores import is_remote
from fsdpctl.io.untrusted import parse_yaml

HUB, _CARD, _DEFAULT = "hf://", "README.md", "default"
_VALIDATION = ("validation", "valid", "val", "dev")
_CSV = (".csv", ".tsv")
_MAIN_SPLITS = ("train", *_VALIDATION)  # splits that users need not name
_SPLITS = (*_MAIN_SPLITS, "training", "test", "testing", "eval", "evaluation")
# Keys of a configuration in a card that don't change the rows.
_CARD_KEYS = {
    "config_name", "data_files", "data_dir", "default", "description", "features", "version",
}  # fmt: skip
# Files about data: a pattern selects them only if it ends with their name.
_DESCRIPTIONS = (
    _CARD, "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip",
    "dataset_dict.json",
)  # fmt: skip
_NAME = re.compile(
    r"hf://(?:datasets/)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w.-]+))?(?::(?P<config>[\w.-]+))?(?:/(?P<split>[\w.-]+))?"
)


def check_tokenizer_paths(config: DataConfig) -> None:
    """Check that the tokenizer and the template that are set exist; UsageError names the key."""
    for key, path in (("tokenizer", config.tokenizer), ("template", config.template)):
        if path not in (None, "bytes") and not Path(path).exists():
            raise UsageError(f"data.{key}={path}: not found{nearest_path_hint(path)}")


def find_data(
    path: str, key: str = "data.path", option: str | None = None, *, fetches: bool = True
) -> DataFiles:
    """Return the files of `path`, which is a local path or hf://NAME of a data set on the Hub.

    `fetches`: download files that are missing in the Hub's cache. UsageError if the files are not
    found or can't be downloaded.
    """
    if path.startswith(HUB):
        return _hub_files(path, key, option, may_fetch=fetches and not is_offline())
    if is_remote(path, f"{key}={path}"):
        raise UsageError(f"{key}={path}: only data=tokens reads from object stores")
    return local_data_files(path, key, option)


def is_cached(path: str, key: str = "data.path") -> bool:
    """Return whether the cache has the files of a data set on the Hub."""
    with suppress(UsageError):
        return bool(_hub_files(path, key, None, may_fetch=False).files)
    return False


def _hub_files(path: str, key: str, option: str | None, *, may_fetch: bool) -> DataFiles:
    """Return the files of `hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]`, fetched if need be.

    The card of the data set names the files of a configuration and a split. If the card does not,
    CONFIG and SPLIT are words in the names of files and directories; without CONFIG and SPLIT,
    `select_files` selects the files. UsageError if no file is found, or if one can't be fetched.
    """
    match, location = _NAME.fullmatch(path), f"{key}={path}"
    if match is None:
        raise UsageError(f"{location}: expected hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]")
    name, revision, *config_split = match.groups()
    repository = Repository(name, revision, "dataset", location)
    if may_fetch and not repository.names():
        with repository.locked():
            repository.fetch(lambda names: [each for each in names if each == _CARD])
    if (snapshot := repository.snapshot()) is None:
        raise repository.missing_error(_CARD)
    files = _select(repository, snapshot, config_split, option)
    names = [each.relative_to(snapshot).as_posix() for each in (*files.files, *files.validation)]
    absent = (each for each in names if not (snapshot / each).is_file())
    missing = next(absent, _missing_shard(names))
    if not missing:
        return files
    if not may_fetch:
        raise repository.missing_error(missing)
    with repository.locked():
        repository.fetch(lambda _: names)
    # Select again: the content of fetched files tells more than the names.
    return _select(repository, snapshot, config_split, option)


def _select(
    repository: Repository,
    snapshot: Path,
    config_split: Sequence[str | None],
    option: str | None,
) -> DataFiles:
    paths = (x.relative_to(snapshot).as_posix() for x in snapshot.rglob("*") if not x.is_dir())
    all_names = sorted(repository.names() or paths)
    location, (config, split) = repository.location, config_split
    check_inside([snapshot / each for each in all_names], snapshot, location)
    if patterns := _patterns(snapshot / _CARD, config, location):
        splits = {
            each: {p: [snapshot / x for x in all_names if _matches(x, p)] for p in of_split}
            for each, of_split in patterns.items()
        }
        return _files_of_splits(splits, split, location, option)
    names = [x for x in all_names if _kind(x) and (not config or _has_word(x, config))]
    if split == "train" and not any(_has_word(each, word) for each in names for word in _SPLITS):
        split = None  # files that are not named after a split are training files
    files = [snapshot / each for each in names if not split or _has_word(each, split)]
    if not files:
        has = f"; the data set has {', '.join(all_names)[:100]}" if all_names else ""
        raise UsageError(f"{location}: files of JSON, Parquet, Arrow, CSV or text: not found{has}")
    are_csv = all(each.suffix in _CSV for each in files)
    is_folder = config_split == [None, None]
    # `select_files` knows CSV only as text.
    option = TEXT if are_csv else option
    data_files = select_files(files, snapshot, location, option, is_folder=is_folder)
    return replace(data_files, kind=CHAT) if are_csv else data_files


def _files_of_splits(
    splits: dict[str, dict[str, list[Path]]], split: str | None, location: str, option: str | None
) -> DataFiles:
    val_split = next((each for each in _VALIDATION if each in splits), None)
    chosen = split or ("train" if "train" in splits else next(iter(splits)))
    if location.startswith("data.val_path") and split is None:
        chosen = val_split or chosen
    if chosen not in splits or (split is None and len(splits) > 1 and chosen not in _MAIN_SPLITS):
        raise UsageError(f"{location}: name a split after a /, of {', '.join(splits)}")
    val_split = None if split or val_split == chosen else val_split
    for each in (chosen, *([val_split] if val_split else [])):
        if pattern := next((x for x, files in splits[each].items() if not files), None):
            raise UsageError(f"{location}: {pattern} in the card of the data set matches no file")
    files_of = {each: [*chain(*files.values())] for each, files in splits.items()}
    train, validation = files_of[chosen], files_of[val_split] if val_split else []
    kinds = {_kind(each.name): each for each in (*train, *validation)}
    if None in kinds or (len(kinds) > 1):
        hint = "expected files of one kind, JSON Lines, Parquet, Arrow, CSV or text"
        raise UsageError(f"{location}: {kinds.get(None, train[0]).name}: not supported; {hint}")
    (kind,) = kinds
    if option == CHAT and kind != CHAT:
        raise UsageError(f"{location}: text without conversations; set data=text")
    used = {*train, *validation}
    unused = ((each, file.name) for each in files_of for file in files_of[each] if file not in used)
    return DataFiles(str(kind), tuple(train), tuple(validation), tuple(unused))


def _kind(name: str) -> str | None:
    if name.endswith(_CSV):
        return CHAT
    return TEXT if name.endswith(".txt") else CHAT if kind_of_file(Path(name)) == CHAT else None


def _patterns(card: Path, config: str | None, location: str) -> dict[str, list[str]]:
    """Return the patterns of files that a card lists, by split; empty if it lists none."""
    configs = _configurations(card, location)
    # `parse_yaml` returns text.
    defaults = [name for name, each in configs.items() if each.get("default") == "true"]
    defaults += [_DEFAULT] if _DEFAULT in configs else [*configs] if len(configs) == 1 else []
    selected = config or next(iter(defaults), "")
    if configs and selected not in configs:
        names = ", ".join(configs)[:200]
        raise UsageError(f"{location}: name a configuration after a :, of {names}")
    chosen = configs.get(selected, {})
    files, folder = chosen.get("data_files"), chosen.get("data_dir")
    if folder and not files:
        raise UsageError(f"{location}: data_dir without data_files in the card: not supported")
    if files and (other := next((each for each in chosen if each not in _CARD_KEYS), None)):
        raise UsageError(f"{location}: {other} of the data set's card: not supported")
    entries = files if isinstance(files, list) else [files] if files else []
    if entries and all(isinstance(each, str) for each in entries):
        entries = [{"split": "train", "path": entries}]
    prefix = f"{str(folder).strip('/')}/" if folder else ""
    patterns_of = dict[str, list[str]]()
    for entry in entries:
        paths = entry.get("path") if isinstance(entry, dict) else None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or "split" not in entry:
            raise UsageError(f"{location}: data_files in the card: expected split and path")
        patterns = [f"{prefix}{str(each).removeprefix('./')}" for each in paths]
        if wrong := next((x for x in patterns if re.search(r"[^/]\*\*|\*\*[^/]", x)), None):
            problem = f"{wrong} in the data set's card: expected /**/ for directories"
            raise UsageError(f"{location}: {problem}")
        patterns_of.setdefault(str(entry["split"]), []).extend(patterns)
    return patterns_of


def _configurations(card: Path, location: str) -> dict[str, dict[str, Any]]:
    """Return the configurations that a card describes, by name."""
    text = read_regular(card).decode("utf-8", "replace") if card.is_file() else ""
    try:
        content = parse_yaml(text.split("---")[1], card.name) if text.startswith("---") else None
    except UsageError as error:
        if "data_files" not in text and "data_dir" not in text:
            return {}
        raise UsageError(f"{location}: the card of the data set cannot be read: {error}") from None
    listed = content.get("configs") if isinstance(content, dict) else None
    configs = [x for x in (listed if isinstance(listed, list) else ()) if isinstance(x, dict)]
    return {str(each.get("config_name", _DEFAULT)): each for each in configs}


def _matches(name: str, pattern: str) -> bool:
    """Return whether the library `datasets` would find a file by a pattern of fsspec.

    ** stands for any directories. Hidden files, directories such as __pycache__ and files about
    data match only if the pattern has a part for them.
    """
    parts, pattern_parts = name.split("/"), pattern.split("/")
    ends = {0}  # how many parts of the name the pattern so far can match
    for number, part in enumerate(pattern_parts, start=1):
        if part == "**" and ends:
            ends = {*range(min(ends) + (number == len(pattern_parts)), len(parts) + 1)}
        else:
            ends = {n + 1 for n in ends if n < len(parts) and fnmatchcase(parts[n], part)}
    described = parts[-1] in _DESCRIPTIONS and parts[-1] != pattern_parts[-1]
    # Hidden parts and directories such as __pycache__, in the name and in the pattern.
    paths = parts, pattern_parts
    counts = [(sum(x[:1] == "." for x in y), sum(x[:2] == "__" for x in y[:-1])) for y in paths]
    return len(parts) in ends and not described and counts[0] == counts[1]


def _missing_shard(names: list[str]) -> str | None:
    """Return the first missing file of a series NAME-00007-of-00100."""
    matches = filter(None, (re.fullmatch(r"(.*-)\d{5}(-of-(\d{5}).*)", each) for each in names))
    numbered = (f"{x[1]}{number:05d}{x[2]}" for x in matches for number in range(int(x[3])))
    return next((each for each in numbered if each not in names), None)


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?:^|[-_./]){re.escape(word)}(?:[-_./]|$)", name) is not None
