"""The files of data: at a path, or by its name on the Hugging Face Hub.

Note: not by the library `datasets`. It opens what a card names, on this machine and on any host,
stores a second copy, and asks the Hub at each start.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from fsdpctl.config.data import CHAT, TEXT, DataConfig
from fsdpctl.config.data_files import DataFiles, local_data_files, option_of_file, select_files
from fsdpctl.errors import UsageError
from fsdpctl.io.files import check_inside, nearest_path_hint, read_regular
from fsdpctl.io.hub_repository import Repository, is_offline
from fsdpctl.io.stores import is_remote
from fsdpctl.io.untrusted import parse_yaml

HUB, _CARD, _DEFAULT = "hf://", "README.md", "default"
_VALIDATION = ("validation", "valid", "val", "dev")
_CSV = (".csv", ".tsv")
_USUAL = ("train", *_VALIDATION)  # splits that need not be named
_SPLITS = (*_USUAL, "training", "test", "testing", "eval", "evaluation")
# Keys of a configuration that change no rows.
_PLAIN = {"config_name", "data_files", "data_dir", "default", "description", "features", "version"}
# Files that a pattern does not select unless it ends with their name.
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
    """Return the files of `data_files`, or of a data set on the Hugging Face Hub."""
    if path.startswith(HUB):
        return _hub_files(path, key, option, may_fetch=fetches and not is_offline())
    if is_remote(path, f"{key}={path}"):
        raise UsageError(f"{key}={path}: only data=tokens reads from object stores")
    return local_data_files(path, key, option)


def is_cached(path: str, key: str = "data.path") -> bool:
    with suppress(UsageError):
        return bool(_hub_files(path, key, None, may_fetch=False).train)
    return False


def _hub_files(path: str, key: str, option: str | None, *, may_fetch: bool) -> DataFiles:
    """Return the files of `hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]`, fetched if need be.

    Its card names the files of a configuration and a split. If it does not, both are words in the
    names of files and directories; without them, `select_files` decides. UsageError if there are
    none, or if they cannot be fetched.
    """
    match, where = _NAME.fullmatch(path), f"{key}={path}"
    if match is None:
        raise UsageError(f"{where}: expected hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]")
    name, revision, *words = match.groups()
    repository = Repository(name, revision, "dataset", where)
    if may_fetch and not repository.names():
        with repository.locked():
            repository.fetch(lambda names: [each for each in names if each == _CARD])
    if (snapshot := repository.snapshot()) is None:
        raise repository.missing_error(_CARD)
    found = _selected(repository, snapshot, words, option)
    names = [each.relative_to(snapshot).as_posix() for each in (*found.train, *found.validation)]
    missing = next(
        (each for each in names if not (snapshot / each).is_file()), _missing_shard(names)
    )
    if not missing:
        return found
    if not may_fetch:
        raise repository.missing_error(missing)
    with repository.locked():
        repository.fetch(lambda _: names)
    return _selected(repository, snapshot, words, option)  # by their content


def _selected(
    repository: Repository, snapshot: Path, words: Sequence[str | None], option: str | None
) -> DataFiles:
    here = (x.relative_to(snapshot).as_posix() for x in snapshot.rglob("*") if not x.is_dir())
    names = everything = sorted(repository.names() or here)
    where, (config, split) = repository.location, words
    check_inside([snapshot / each for each in names], snapshot, where)
    if patterns := _patterns(snapshot / _CARD, config, where):
        splits = {
            each: {p: [snapshot / name for name in names if _matches(name, p)] for p in found}
            for each, found in patterns.items()
        }
        return _files_of_splits(splits, split, where, option)
    names = [each for each in names if _kind(each) and (not config or _has_word(each, config))]
    if split == "train" and not any(_has_word(each, word) for each in names for word in _SPLITS):
        split = None  # files without the name of a split are to train on
    files = [snapshot / each for each in names if not split or _has_word(each, split)]
    if not files:
        has = f"; it has {', '.join(everything)[:100]}" if everything else ""
        raise UsageError(f"{where}: no such files of JSON, Parquet, Arrow, CSV or text{has}")
    are_csv = all(each.suffix in _CSV for each in files)
    option = TEXT if are_csv else option
    found = select_files(files, snapshot, where, option, is_folder=words == [None, None])
    about = found.train, found.validation, found.unused
    return DataFiles(CHAT if are_csv else found.option, *about)


def _files_of_splits(
    splits: dict[str, dict[str, list[Path]]], split: str | None, where: str, option: str | None
) -> DataFiles:
    held = next((each for each in _VALIDATION if each in splits), None)
    chosen = split or ("train" if "train" in splits else next(iter(splits)))
    if where.startswith("data.val_path") and split is None:
        chosen = held or chosen
    if chosen not in splits or (split is None and len(splits) > 1 and chosen not in _USUAL):
        raise UsageError(f"{where}: name a split after a /, of {', '.join(splits)}")
    held = None if split or held == chosen else held
    for each in (chosen, *([held] if held else [])):
        if lacks := next((x for x, files in splits[each].items() if not files), None):
            raise UsageError(f"{where}: {lacks} in the card of the data set matches no file")
    found = {each: [*chain(*files.values())] for each, files in splits.items()}
    train, validation = found[chosen], found[held] if held else []
    kinds = {_kind(each.name): each for each in (*train, *validation)}
    if None in kinds or (len(kinds) > 1):
        way = "expected files of one kind, JSON Lines, Parquet, Arrow, CSV or text"
        raise UsageError(f"{where}: {kinds.get(None, train[0]).name}: not supported; {way}")
    (kind,) = kinds
    if option == CHAT and kind != CHAT:
        raise UsageError(f"{where}: text without conversations; set data=text")
    used = {*train, *validation}
    rest = ((each, file.name) for each in found for file in found[each] if file not in used)
    return DataFiles(str(kind), tuple(train), tuple(validation), tuple(rest))


def _kind(name: str) -> str | None:
    if name.endswith(_CSV):
        return CHAT
    return TEXT if name.endswith(".txt") else CHAT if option_of_file(Path(name)) == CHAT else None


def _patterns(card: Path, config: str | None, where: str) -> dict[str, list[str]]:
    text = read_regular(card).decode("utf-8", "replace") if card.is_file() else ""
    try:
        about = parse_yaml(text.split("---")[1], card.name) if text.startswith("---") else None
    except UsageError as error:
        if "data_files" not in text and "data_dir" not in text:
            return {}
        raise UsageError(f"{where}: the card of the data set cannot be read: {error}") from None
    listed = about.get("configs") if isinstance(about, dict) else None
    known = {
        str(each.get("config_name", _DEFAULT)): each
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, dict)
    }
    usual = [name for name, each in known.items() if each.get("default") == "true"]
    usual += [_DEFAULT] if _DEFAULT in known else [*known] if len(known) == 1 else []
    if known and (config or (usual or [""])[0]) not in known:
        raise UsageError(f"{where}: name a configuration after a :, of {', '.join(known)[:200]}")
    chosen = known.get(config or (usual or [""])[0], {})
    files, folder = chosen.get("data_files"), chosen.get("data_dir")
    if folder and not files:
        raise UsageError(f"{where}: data_dir of the data set's card, without files: not supported")
    if files and (other := next((each for each in chosen if each not in _PLAIN), None)):
        raise UsageError(f"{where}: {other} of the data set's card: not supported")
    rows = files if isinstance(files, list) else [files] if files else []
    if all(isinstance(each, str) for each in rows):
        rows = [{"split": "train", "path": rows}] * bool(rows)
    above, found = f"{str(folder).strip('/')}/" if folder else "", dict[str, list[str]]()
    for row in rows:
        paths = row.get("path") if isinstance(row, dict) else None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or "split" not in row:
            raise UsageError(f"{where}: data_files in the data set's card: expected split and path")
        patterns = [f"{above}{str(each).removeprefix('./')}" for each in paths]
        if wrong := next((x for x in patterns if re.search(r"[^/]\*\*|\*\*[^/]", x)), None):
            problem = f"{wrong} in the data set's card: expected /**/ for directories"
            raise UsageError(f"{where}: {problem}")
        found.setdefault(str(row["split"]), []).extend(patterns)
    return found


def _matches(name: str, pattern: str) -> bool:
    """Return whether a file is one of those that `datasets` finds by a pattern, of fsspec.

    ** is any directories. Hidden names, directories such as __pycache__ and descriptions of data
    are left out unless the pattern has a part for them.
    """
    parts, wanted = name.split("/"), pattern.split("/")
    ends = {0}  # numbers of parts that the pattern so far may match
    for number, part in enumerate(wanted, start=1):
        if part == "**" and ends:
            ends = {*range(min(ends) + (number == len(wanted)), len(parts) + 1)}
        else:
            ends = {n + 1 for n in ends if n < len(parts) and fnmatchcase(parts[n], part)}
    described = parts[-1] in _DESCRIPTIONS and parts[-1] != wanted[-1]
    both = parts, wanted
    counts = [(sum(x[:1] == "." for x in y), sum(x[:2] == "__" for x in y[:-1])) for y in both]
    return len(parts) in ends and not described and counts[0] == counts[1]


def _missing_shard(names: list[str]) -> str | None:
    """Return a file that is not there of those numbered as NAME-00007-of-00100."""
    found = filter(None, (re.fullmatch(r"(.*-)\d{5}(-of-(\d{5}).*)", each) for each in names))
    numbered = (f"{x[1]}{number:05d}{x[2]}" for x in found for number in range(int(x[3])))
    return next((each for each in numbered if each not in names), None)


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?:^|[-_./]){re.escape(word)}(?:[-_./]|$)", name) is not None
