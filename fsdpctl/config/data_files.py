"""The files of a path that are data, with their kinds and splits. docs/data.md has the rules.

Splits have the names and separators of the library `datasets`.
"""

import glob
import json
import os
import re
from codecs import BOM_UTF8
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from fsdpctl.config.data import CHAT, TEXT, TOKEN_NEIGHBORS, TOKEN_SUFFIXES, TOKENS
from fsdpctl.config.data_sources import DataSource
from fsdpctl.errors import UsageError, shorten_list
from fsdpctl.io.files import check_inside, nearest_path_hint

TRAIN, VALIDATION, _TEST = "train", "validation", "test"
_ABOUT_DATA, _EMPTY, _OTHER = "about data", "empty", "of another format"
TOKENIZE = "tokenize"  # input of `fsdpctl tokenize`; not an option of `data`
# The kinds that each option reads, in order of preference; None: the files select the option.
_READS = {
    None: (CHAT, TOKENS, TEXT), TOKENIZE: (TEXT, CHAT), TEXT: (TEXT, CHAT), CHAT: (CHAT,),
    TOKENS: (TOKENS,),
}  # fmt: skip
_NOUNS = {TEXT: "text", CHAT: "rows", TOKENS: "tokens"}
_NOT_FOUND = {
    CHAT: "no conversations found; expected .jsonl, .json or .parquet",
    TOKENS: f"no token files, of {', '.join(TOKEN_SUFFIXES)}",
    TEXT: "no text found",
}
_ROW_FILE = re.compile(r".+\.(?:(?:jsonl|jsonlines|jl|ndjson|json)(?:\.gz|\.zst)?|parquet|arrow)")
_TABLES = {".csv", ".tsv"}
# Suffixes of texts; a README next to such files is not data.
_PROSE = {"", ".txt", ".text", ".tokens", ".raw", *_TABLES}
_MAY_HAVE_ROWS = ("", ".json", ".txt")  # the first bytes decide
_ROW_KEYS = (
    "messages", "conversations", "prompt", "completion", "instruction", "query", "question",
    "output", "response", "history", "text",
)  # fmt: skip
_BY_PARTS = attrgetter("parts")  # a sort key, faster than comparing paths
_FIRST_BYTES = 1 << 16  # searched for the first row of a file
# Files that `datasets` writes: caches of `map`, and descriptions of data.
_CACHES = re.compile(r"cache-.*\.arrow|tmp[a-z0-9_]{8}|(?:dataset_(?:infos?|dict)|state)\.json")
# Texts about data, which are left out next to rows or tokens.
_ABOUT_FILE = re.compile(
    r"(?:readme|licen[cs]e|copying|notice|citation|code_of_conduct)(?:[-_. ].*)?"
    r"|(?:(?:.*[-_ ])?card|datasheet|authors|changelog|changes|contributing|requirements|manifest"
    r"|checksums?|md5sums?|sha\d+sums?|thumbs|desktop)(?:\.\w+)?"
    r"|.+\.(?:ya?ml|lock|crc|md5|sha\d+)|_success"
)
# By suffixes of formats that are never read as text: the problem and the next step.
_REFUSED = {
    "pdf": "a PDF; convert it, for example with pdftotext",
    "docx doc odt epub": "a document; convert it with pandoc",
    "zip tar gz tgz bz2 xz zst 7z": "compressed; unpack it",
    "png jpg jpeg gif webp mp3 wav mp4": "an image or a recording; expected text",
    "xlsx xls": "a table; set data=chat with .jsonl or .parquet",
    "json": "JSON without rows; expected JSON Lines or an array of objects",
    "safetensors pt pth": "model weights; to start from them, set model=hf model.path=DIR",
    "gguf": "model weights; to start from them, set model=hf model.path=FILE.gguf",
}
_OTHER_FORMATS = {f".{end}": why for ends, why in _REFUSED.items() for end in ends.split()}
_SPLIT = re.compile(
    r"(?:^|(?<=[-._ 0-9]))(?:(?P<train>train|training)|(?P<validation>validation|valid|val|dev)"
    r"|(?P<test>test|testing|eval|evaluation))(?=[-._ 0-9]|$)"
)
_SHARD = re.compile(r"(.+)[-.]\d{5}-of-\d{5}.*")
_CONFIG_NAME = re.compile(r"^[\s-]*config_name:\s*(\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a path that are data."""

    kind: str  # value of `data`; data=text also reads rows
    files: tuple[Path, ...]  # to train on, or to validate on if the path is data.val_path
    validation: tuple[Path, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # the split ("": none) and the name of each file

    def summary(self, *, validates: bool, skipped: int = 0) -> str:
        """Return how many files are used, without `skipped` files, and which are left out."""
        used = len(self.files) + len(self.validation) * validates - skipped
        total = len(self.files) + len(self.validation) + len(self.left_out)
        counts = Counter(split for split, _ in self.left_out if split)
        counts[VALIDATION] += len(self.validation) * (not validates)
        others = [f"{count} {split}" for split, count in counts.items() if count]
        others += [name for split, name in self.left_out if not split]
        text = f"{used:,} file{'' if used == 1 else 's'}" + f" of {total:,}" * (used != total)
        if validates and self.validation:
            text += f", {len(self.validation):,} of them to validate"
        return f"{text}; left out: {shorten_list(others)}" if others else text


def local_data_files(path: str, key: str = "data.path", option: str | None = None) -> DataFiles:
    """Return the data files of a local path, which is a file, a directory or a glob.

    If `key` is data.val_path, these are the validation files. `option` is the option of `data`,
    TOKENIZE, or None if the files select the option. UsageError if no data is found, or if the
    names of the files are ambiguous.
    """
    target, location, files = Path(path), f"{key}={path}", _list_files(path, key)
    if not target.is_file():
        is_folder = target.is_dir()
        root = target if is_folder else Path(os.path.dirname(re.split(r"[*?\[]", path)[0]))
        return select_files(files, root, location, option, is_folder=is_folder)
    kind, suffix = kind_of_file(target), target.suffix.lower()
    kind = kind if kind in _READS[option] else _READS[option][0]
    if kind == TEXT and suffix in _OTHER_FORMATS and (suffix, option) != (".json", TEXT):
        next_step = ", or set data=text" * (suffix == ".json" and option is None)
        raise UsageError(f"{location}: {_OTHER_FORMATS[suffix]}{next_step}")
    return DataFiles(kind, (target,))


def kind_of_path(path: str) -> str:
    """Return the option of `data` for a path, by its files, or by its name if it isn't found.

    UsageError if a directory has files of several options.
    """
    if path.startswith("hf://"):
        return CHAT
    is_here = os.path.exists(path) or any(glob.iglob(path))
    return local_data_files(path).kind if is_here else kind_of_file(Path(path))


def kind_of_file(file: Path) -> str:
    """Return the option of `data` for a file, by its name or its first bytes."""
    name, suffix = file.name.lower(), file.suffix.lower()
    if name.endswith(TOKEN_SUFFIXES):
        return TOKENS
    if suffix in _MAY_HAVE_ROWS and file.is_file():
        return CHAT if _begins_with_rows(file) else TEXT
    return CHAT if _ROW_FILE.fullmatch(name) else TEXT


def _first_bytes(file: Path, size: int = _FIRST_BYTES) -> bytes:
    """Return the first bytes of a file; empty if unreadable: its reader reports the error."""
    try:
        with file.open("rb") as content:
            return content.read(size)
    except OSError:
        return b""


def _begins_with_rows(file: Path) -> bool:
    if _first_bytes(file, 256).removeprefix(BOM_UTF8).lstrip()[:1] not in (b"{", b"["):
        return False
    text = _first_bytes(file).decode("utf-8-sig", "replace").lstrip()
    is_array = text.startswith("[")
    text = text[1:].lstrip() if is_array else text
    line = text.partition("\n")[0].rstrip()
    try:
        first, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        # The row exceeds the first bytes, or is damaged, which the reader reports.
        may_be_row = is_array or line.endswith("}") or len(line) == len(text)
        return may_be_row and re.match(r'\{\s*"', text) is not None
    if is_array or not isinstance(first, dict):
        return isinstance(first, dict)
    is_row = text[end:].lstrip().startswith("{") or not first.keys().isdisjoint(_ROW_KEYS)
    return is_row and end <= len(line)


def _list_files(path: str, key: str) -> list[Path]:
    """Return a file, all files below a directory, or the files of a glob, sorted."""
    target = Path(path)
    if not path:
        raise UsageError(f"{key}: empty; expected a file, a directory or a glob")
    try:
        if target.is_file():
            return [target]
        if target.is_dir():
            files_below = sorted(_files_below(target), key=_BY_PARTS)
            check_inside(files_below, target, f"{key}={path}")
            return files_below
        matches = sorted(map(Path, glob.glob(path, recursive=True)), key=_BY_PARTS)
        files = [each for each in matches if each.is_file()]
    except OSError as error:
        raise UsageError(f"{key}={path}: {str(error.filename)[:80]}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{key}={path}: directories are nested too deeply for **") from None
    if not files:
        if target.exists():
            raise UsageError(f"{key}={path}: not a regular file; expected a file or a directory")
        hint = nearest_path_hint(path) or "; expected a file, a directory or a glob"
        raise UsageError(f"{key}={path}: not found{hint}")
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files except hidden files and those of run directories, which may change."""
    folders = [folder]
    while folders:
        entries = [each for each in folders.pop().iterdir() if not each.name.startswith(".")]
        if {"config.yaml", "overrides.txt"} <= {each.name for each in entries}:
            continue
        folders += [each for each in entries if each.is_dir() and not each.is_symlink()]
        yield from (each for each in entries if each.is_file())


def select_files(
    files: Sequence[Path], root: Path, location: str, option: str | None, *, is_folder: bool
) -> DataFiles:
    """Select the data files among `files` below `root`, as `local_data_files`.

    `is_folder`: `files` are all files of a directory, rather than named by the user.
    """
    kinds = defaultdict[str, list[Path]](list)
    for file in files:
        kinds[_role_of(file)].append(file)
    kind = _kind_in(kinds, location, option)
    suffixes = {each.suffix.lower() for each in kinds[kind]} or {".md"}  # only READMEs: the text
    about_data = set(kinds[_ABOUT_DATA] if kind == TEXT and not suffixes <= _TABLES else ())
    data = about_data | set(kinds[kind])
    splits = {each: _splits_of(each.relative_to(root).parts) for each in files if each in data}
    # Text has splits only if each file names one, READMEs next to prose aside, and one is `train`.
    has_code = not suffixes <= _PROSE
    named = [splits[each] for each in splits if has_code or each not in about_data]
    if kind == TEXT and not ({TRAIN} in named and all(len(each) == 1 for each in named)):
        splits = dict.fromkeys(splits, set[str]())
    groups: dict[str, list[Path]] = {TRAIN: [], VALIDATION: [], _TEST: [], "": []}
    for file, file_splits in splits.items():
        if len(file_splits) > 1:
            problem = f"name matches several splits, {' and '.join(sorted(file_splits))}"
            problem += "; name the files to read, or rename it"
            raise UsageError(f"{location}: {file.name}: {problem}")
        groups["".join(file_splits)].append(file)
    if is_folder and kind != TEXT:
        _check_one_data_set(groups, root, location)
    train, validation = _train_and_validation(groups, location, is_folder=is_folder)
    selected, empty = {*train, *validation}, set(kinds[_EMPTY])
    # Files that describe token files are not reported as left out.
    neighbors = TOKEN_NEIGHBORS if kind == TOKENS else ()
    left_out = tuple(
        ("".join(splits.get(each, ())), f"{each.name}{' (empty)' * (each in empty)}")
        for each in files
        if each not in selected and each.suffix not in neighbors
    )
    return DataFiles(kind, tuple(train), tuple(validation), left_out)


def _role_of(file: Path) -> str:
    name, suffix, kind = file.name.lower(), file.suffix.lower(), kind_of_file(file)
    is_other = kind == TEXT and (suffix in _OTHER_FORMATS or suffix in TOKEN_NEIGHBORS)
    if kind == TEXT and not is_other and _ABOUT_FILE.fullmatch(name):
        return _ABOUT_DATA
    if kind != TOKENS and file.is_file() and not file.stat().st_size:
        return _EMPTY  # an empty token file is reported by its reader, which knows the header
    return _OTHER if is_other or _CACHES.fullmatch(name) else kind


def _kind_in(kinds: dict[str, list[Path]], location: str, option: str | None) -> str:
    present = [kind for kind in _READS[option] if kinds[kind]]
    several_roles = sum(map(bool, kinds.values())) > 1
    if TEXT in present and several_roles and all(b"\0" in _first_bytes(x) for x in kinds[TEXT]):
        present.remove(TEXT)  # binary files next to other kinds are not text
    if len(present) > 1:
        counts = [f"{len(kinds[x]):,} of {_NOUNS[x]} ({kinds[x][0].name})" for x in present]
        # Next to rows, data=text would read both.
        options = [each for each in present if each != TEXT or CHAT not in present]
        next_step = f"set data={' or data='.join(options)}, or " * (option is None)
        if TEXT in present and CHAT in present and option != TOKENIZE:
            what = "all" if len(present) == 2 else "text and rows"
            mixture = _mixture_setting(kinds[TEXT], kinds[CHAT])
            next_step += f"to read {what}, set data=text {mixture}, or "
        problem = f"has files of several kinds, {' and '.join(counts)}"
        raise UsageError(f"{location}: {problem}; {next_step}name the files of one kind")
    if present or (kinds[_ABOUT_DATA] and not several_roles and TEXT in _READS[option]):
        return present[0] if present else TEXT
    got = [f"{x.name}{' (empty)' * (role == _EMPTY)}" for role in kinds for x in kinds[role]]
    formats = [(x.name, _OTHER_FORMATS.get(x.suffix.lower())) for x in kinds[_OTHER]]
    reasons = [f"; {name}: {reason}" for name, reason in formats if reason]
    more = f", got {shorten_list(got)}" * bool(got) + "".join(reasons[:1])
    raise UsageError(f"{location}: {_NOT_FOUND.get(str(option), _NOT_FOUND[TEXT])}{more}")


def _mixture_setting(*kinds: list[Path]) -> str:
    """Return a setting that names files as a mixture, with globs that select no other file."""
    patterns = dict[str, None]()
    kind_by_file = {file: {*kind} for kind in kinds for file in kind}
    for file in sorted(kind_by_file, key=_BY_PARTS):
        pattern = f"{glob.escape(str(file.parent))}/*{file.suffix}"
        matches = {*map(Path, glob.glob(pattern))} if file.suffix else set()
        is_exact = len(matches) > 1 and matches <= kind_by_file[file]
        patterns[pattern if is_exact else str(file)] = None
    names = Counter(DataSource(each).name for each in patterns)
    labels = ("" if names[DataSource(x).name] == 1 else f"part{n}=" for n, x in enumerate(patterns))
    return f"'data.path={','.join(map(''.join, zip(labels, patterns, strict=True)))}'"


def _splits_of(parts: Sequence[str]) -> set[str]:
    """Return the splits that the directories name, else those of the file name."""
    splits = [{str(x.lastgroup) for x in _SPLIT.finditer(part.lower())} for part in parts]
    return set().union(*splits[:-1]) or splits[-1]


def _train_and_validation(
    groups: dict[str, list[Path]], location: str, *, is_folder: bool
) -> tuple[list[Path], list[Path]]:
    named = [each for each in groups.values() if each]
    if len(named) == 1 and not is_folder:
        return named[0], []
    is_validation = location.startswith("data.val_path")
    files, validation = groups[TRAIN] or groups[""], groups[VALIDATION]
    if is_validation:  # without validation files: test or other files, but no training files
        files, validation = validation or ([] if groups[TRAIN] else named[-1]), []
    if not files:
        verb = "validate" if is_validation else "train"
        names = shorten_list([each.name for group in named for each in group])
        raise UsageError(f"{location}: no files to {verb} on, but {names}; name those to read")
    return files, validation


def _check_one_data_set(groups: dict[str, list[Path]], root: Path, location: str) -> None:
    is_dict, readme = (root / "dataset_dict.json").is_file(), root / "README.md"
    data_sets = set[str]()
    for file in groups[TRAIN] or (groups[""] if is_dict else []):
        *folders, name = file.relative_to(root).parts
        split_index = next((n for n, each in enumerate(folders) if _splits_of([each])), None)
        shard = _SHARD.fullmatch(name) if split_index is None and not is_dict else None
        # The splits `train` and `train_sft` of a DatasetDict are two sets: keep their directory.
        parents = folders if split_index is None else folders[: split_index + is_dict]
        data_sets.add("/".join([*parents, shard[1]] if shard else parents))
    start = _first_bytes(readme).decode("utf-8", "replace") if readme.is_file() else ""
    header = start.split("---")[1] if start.startswith("---") else ""
    configs = {*_CONFIG_NAME.findall(header)}
    data_sets |= configs if len(configs) > 1 else set()
    if len(data_sets) > 1:
        names = shorten_list(sorted(each or "." for each in data_sets))
        problem = f"several sets to train on, {names}; name the directory or files of one of them"
        raise UsageError(f"{location}: {problem}")
