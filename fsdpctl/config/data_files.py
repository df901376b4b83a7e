"""Which files of a path are data, of which kind and split: decided once for all that read them.

Note: names of splits are those of the `datasets` library, with its separators. docs/data.md has the
rules.
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
TOKENIZE = "tokenize"  # in place of an option of `data`
# The kinds that an option reads, in the order of preference; None: the files select the option.
_READS = {
    None: (CHAT, TOKENS, TEXT), TOKENIZE: (TEXT, CHAT), TEXT: (TEXT, CHAT), CHAT: (CHAT,),
    TOKENS: (TOKENS,),
}  # fmt: skip
_NOUNS = {TEXT: "text", CHAT: "rows", TOKENS: "tokens"}
_NOTHING = {
    CHAT: "no conversations found; expected .jsonl, .json or .parquet",
    TOKENS: f"no token files, of {', '.join(TOKEN_SUFFIXES)}",
    TEXT: "no text found",
}
_ROWS = re.compile(r".+\.(?:(?:jsonl|jsonlines|jl|ndjson|json)(?:\.gz|\.zst)?|parquet|arrow)")
_TABLES = {".csv", ".tsv"}
_PROSE = {"", ".txt", ".text", ".tokens", ".raw", *_TABLES}  # a README is not part of it
_MAY_HAVE_ROWS = ("", ".json", ".txt")  # as their first bytes tell
_KEYS = (
    "messages", "conversations", "prompt", "completion", "instruction", "query", "question",
    "output", "response", "history", "text",
)  # fmt: skip
_PARTS = attrgetter("parts")  # comparing paths is slower
_FIRST_BYTES = 1 << 16  # of a file, that tell whether it has rows
# Caches of a `map` of `datasets`, and what it writes about data.
_CACHES = re.compile(r"cache-.*\.arrow|tmp[a-z0-9_]{8}|(?:dataset_(?:infos?|dict)|state)\.json")
# Texts about data, which are not data next to rows or tokens.
_ABOUT = re.compile(
    r"(?:readme|licen[cs]e|copying|notice|citation|code_of_conduct)(?:[-_. ].*)?"
    r"|(?:(?:.*[-_ ])?card|datasheet|authors|changelog|changes|contributing|requirements|manifest"
    r"|checksums?|md5sums?|sha\d+sums?|thumbs|desktop)(?:\.\w+)?"
    r"|.+\.(?:ya?ml|lock|crc|md5|sha\d+)|_success"
)
# Suffixes of files of other formats than text, whatever their bytes, and the next step.
_NO_TEXT = {
    "pdf": "a PDF; convert it, for example with pdftotext",
    "docx doc odt epub": "a document; convert it with pandoc",
    "zip tar gz tgz bz2 xz zst 7z": "compressed; unpack it",
    "png jpg jpeg gif webp mp3 wav mp4": "an image or a recording; expected text",
    "xlsx xls": "a table; set data=chat with .jsonl or .parquet",
    "json": "JSON without rows; expected JSON Lines or an array of objects",
    "safetensors pt pth": "model weights; to start from them, set model=hf model.path=DIR",
    "gguf": "model weights; to start from them, set model=hf model.path=FILE.gguf",
}
_OTHER_FORMATS = {f".{end}": why for ends, why in _NO_TEXT.items() for end in ends.split()}
_SPLIT = re.compile(
    r"(?:^|(?<=[-._ 0-9]))(?:(?P<train>train|training)|(?P<validation>validation|valid|val|dev)"
    r"|(?P<test>test|testing|eval|evaluation))(?=[-._ 0-9]|$)"
)
_SHARD = re.compile(r"(.+)[-.]\d{5}-of-\d{5}.*")
_CONFIG = re.compile(r"^[\s-]*config_name:\s*(\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a path that are data."""

    option: str  # of `data`, for their kind; data=text reads texts in rows, too
    train: tuple[Path, ...]  # at data.val_path: those to validate on
    validation: tuple[Path, ...] = ()
    unused: tuple[tuple[str, str], ...] = ()  # the split, or empty text, and the name of each

    def summary(self, *, validates: bool, skipped: int = 0) -> str:
        """Describe how many files are used, without those that were `skipped`, and all others."""
        used = len(self.train) + len(self.validation) * validates - skipped
        total = len(self.train) + len(self.validation) + len(self.unused)
        counts = Counter(split for split, _ in self.unused if split)
        counts[VALIDATION] += len(self.validation) * (not validates)
        others = [f"{count} {split}" for split, count in counts.items() if count]
        others += [name for split, name in self.unused if not split]
        text = f"{used:,} file{'' if used == 1 else 's'}" + f" of {total:,}" * (used != total)
        if validates and self.validation:
            text += f", {len(self.validation):,} of them to validate"
        return f"{text}; left out: {shorten_list(others)}" if others else text


def local_data_files(path: str, key: str = "data.path", option: str | None = None) -> DataFiles:
    """Return the files of a local path that are data: a file, those of a directory, or of a glob.

    At data.val_path, these are the files to validate on. `option` is that of `data`, TOKENIZE, or
    None if the files select it. UsageError if there are none, or if their names leave open which
    ones are meant.
    """
    place, where, files = Path(path), f"{key}={path}", _listed(path, key)
    if not place.is_file():
        is_folder = place.is_dir()
        root = place if is_folder else Path(os.path.dirname(re.split(r"[*?\[]", path)[0]))
        return select_files(files, root, where, option, is_folder=is_folder)
    kind = kind if (kind := option_of_file(place)) in _READS[option] else _READS[option][0]
    suffix = place.suffix.lower()
    if kind == TEXT and suffix in _OTHER_FORMATS and (suffix, option) != (".json", TEXT):
        way = ", or set data=text" * (suffix == ".json" and option is None)
        raise UsageError(f"{where}: {_OTHER_FORMATS[suffix]}{way}")
    return DataFiles(kind, (place,))


def option_of_path(path: str) -> str:
    """Return the option of `data` for a path: by its files, or by its name if it doesn't exist.

    UsageError if a directory has files of several options.
    """
    if path.startswith("hf://"):
        return CHAT
    is_here = os.path.exists(path) or any(glob.iglob(path))
    return local_data_files(path).option if is_here else option_of_file(Path(path))


def option_of_file(file: Path) -> str:
    """Return the option of `data` for a file, by its name or its first bytes."""
    name, suffix = file.name.lower(), file.suffix.lower()
    if name.endswith(TOKEN_SUFFIXES):
        return TOKENS
    if suffix in _MAY_HAVE_ROWS and file.is_file():
        return CHAT if _begins_with_rows(file) else TEXT
    return CHAT if _ROWS.fullmatch(name) else TEXT


def _start(file: Path, most: int = _FIRST_BYTES) -> bytes:
    """Return the first bytes of a file, none of one whose reader will report why."""
    try:
        with file.open("rb") as content:
            return content.read(most)
    except OSError:
        return b""


def _begins_with_rows(file: Path) -> bool:
    if _start(file, 256).removeprefix(BOM_UTF8).lstrip()[:1] not in (b"{", b"["):
        return False
    text = _start(file).decode("utf-8-sig", "replace").lstrip()
    is_array = text.startswith("[")
    text = text[1:].lstrip() if is_array else text
    line = text.partition("\n")[0].rstrip()
    try:
        first, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # longer than this, or damaged, which the reader reports
        is_line = is_array or line.endswith("}") or len(line) == len(text)
        return is_line and re.match(r'\{\s*"', text) is not None
    if is_array or not isinstance(first, dict) or end > len(line):
        return is_array and isinstance(first, dict)
    return text[end:].lstrip().startswith("{") or not first.keys().isdisjoint(_KEYS)


def _listed(path: str, key: str) -> list[Path]:
    """Return a file, all files below a directory, or the files of a glob, sorted."""
    place = Path(path)
    if not path:
        raise UsageError(f"{key}: empty; expected a file, a directory or a glob")
    try:
        if place.is_file():
            return [place]
        if place.is_dir():
            found = sorted(_files_below(place), key=_PARTS)
            check_inside(found, place, f"{key}={path}")
            return found
        matches = sorted(map(Path, glob.glob(path, recursive=True)), key=_PARTS)
        files = [each for each in matches if each.is_file()]
    except OSError as error:
        raise UsageError(f"{key}={path}: {str(error.filename)[:80]}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{key}={path}: directories are nested too deeply for **") from None
    if not files:
        if place.exists():
            raise UsageError(f"{key}={path}: not a regular file; expected a file or a directory")
        hint = nearest_path_hint(path) or "; expected a file, a directory or a glob"
        raise UsageError(f"{key}={path}: not found{hint}")
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files, except hidden ones and those of runs, which may change while read."""
    folders = [folder]
    while folders:
        entries = [each for each in folders.pop().iterdir() if not each.name.startswith(".")]
        if {"config.yaml", "overrides.txt"} <= {each.name for each in entries}:
            continue
        folders += [each for each in entries if each.is_dir() and not each.is_symlink()]
        yield from (each for each in entries if each.is_file())


# ---- kinds and splits ---------------------------------------------------------------------------


def select_files(
    files: Sequence[Path], root: Path, where: str, option: str | None, *, is_folder: bool
) -> DataFiles:
    """Return those of some files below `root` that are data, as `data_files` does.

    `is_folder`: they are all that a directory has, and none of them was named.
    """
    kinds = defaultdict[str, list[Path]](list)
    for file in files:
        kinds[_role_of(file)].append(file)
    kind = _kind_in(kinds, where, option)
    suffixes = {each.suffix.lower() for each in kinds[kind]} or {".md"}
    about = set(kinds[_ABOUT_DATA] if kind == TEXT and not suffixes <= _TABLES else ())
    data = about | set(kinds[kind])
    splits = {each: _splits_of(each.relative_to(root).parts) for each in files if each in data}
    is_code = not suffixes <= _PROSE
    named = [found for each, found in splits.items() if is_code or each not in about]
    if kind == TEXT and not ({TRAIN} in named and all(len(each) == 1 for each in named)):
        splits = {each: set() for each in splits}
    groups: dict[str, list[Path]] = {TRAIN: [], VALIDATION: [], _TEST: [], "": []}
    for file, found in splits.items():
        if len(found) > 1:
            raise UsageError(
                f"{where}: {file.name}: named after several splits, {' and '.join(sorted(found))}; "
                "name the files to read, or rename it"
            )
        groups["".join(found)].append(file)
    if is_folder and kind != TEXT:
        _check_is_one_set(groups, root, where)
    train, validation = _parts_of(groups, where, is_folder=is_folder)
    used, empty = {*train, *validation}, set(kinds[_EMPTY])
    described = TOKEN_NEIGHBORS if kind == TOKENS else ()  # by files that are part of the data
    left_out = tuple(
        ("".join(splits.get(each, ())), f"{each.name}{' (empty)' * (each in empty)}")
        for each in files
        if each not in used and each.suffix not in described
    )
    return DataFiles(kind, tuple(train), tuple(validation), left_out)


def _role_of(file: Path) -> str:
    name, suffix, kind = file.name.lower(), file.suffix.lower(), option_of_file(file)
    is_other = kind == TEXT and (suffix in _OTHER_FORMATS or suffix in TOKEN_NEIGHBORS)
    if kind == TEXT and not is_other and _ABOUT.fullmatch(name):
        return _ABOUT_DATA
    if kind != TOKENS and file.is_file() and not file.stat().st_size:
        return _EMPTY  # its reader compares a token file with the number that a header promises
    return _OTHER if is_other or _CACHES.fullmatch(name) else kind


def _kind_in(kinds: dict[str, list[Path]], where: str, option: str | None) -> str:
    present = [kind for kind in _READS[option] if kinds[kind]]
    are_many = len([kind for kind in kinds if kinds[kind]]) > 1
    if TEXT in present and are_many and all(b"\0" in _start(each) for each in kinds[TEXT]):
        present.remove(TEXT)
    if len(present) > 1:
        counts = " and ".join(
            f"{len(kinds[kind]):,} of {_NOUNS[kind]} ({kinds[kind][0].name})" for kind in present
        )
        ways = [each for each in present if each != TEXT or CHAT not in present]  # reads both
        way = f"set data={' or data='.join(ways)}, or " * (option is None)
        if TEXT in present and CHAT in present and option != TOKENIZE:
            what = "all" if len(present) == 2 else "text and rows"
            way += f"to read {what}, set data=text {_all_of(kinds[TEXT], kinds[CHAT])}, or "
        problem = f"has files of several kinds, {counts}; {way}name the files of one kind"
        raise UsageError(f"{where}: {problem}")
    if present or (kinds[_ABOUT_DATA] and not are_many and TEXT in _READS[option]):
        return (*present, TEXT)[0]
    got = [f"{x.name}{' (empty)' * (role == _EMPTY)}" for role in kinds for x in kinds[role]]
    steps = [
        f"; {x.name}: {why}" for x in kinds[_OTHER] if (why := _OTHER_FORMATS.get(x.suffix.lower()))
    ]
    more = f", got {shorten_list(got)}" * bool(got) + "".join(steps[:1])
    raise UsageError(f"{where}: {_NOTHING.get(str(option), _NOTHING[TEXT])}{more}")


def _all_of(*kinds: list[Path]) -> str:
    """Return a setting that names files as a mixture, by globs where these select no other file."""
    words = dict[str, None]()
    kind_by_file = {file: {*kind} for kind in kinds for file in kind}
    for file in sorted(kind_by_file, key=_PARTS):
        pattern = f"{glob.escape(str(file.parent))}/*{file.suffix}"
        found = {*map(Path, glob.glob(pattern))} if file.suffix else set()
        words[pattern if len(found) > 1 and found <= kind_by_file[file] else str(file)] = None
    names = Counter(DataSource(each).name for each in words)
    named = [
        f"{'' if names[DataSource(x).name] == 1 else f'part{n}='}{x}" for n, x in enumerate(words)
    ]
    return f"'data.path={','.join(named)}'"


def _splits_of(parts: Sequence[str]) -> set[str]:
    *folders, name = ({str(m.lastgroup) for m in _SPLIT.finditer(p.lower())} for p in parts)
    return set().union(*folders) or name


def _parts_of(
    groups: dict[str, list[Path]], where: str, *, is_folder: bool
) -> tuple[list[Path], list[Path]]:
    named = [each for each in groups.values() if each]
    if len(named) == 1 and not is_folder:
        return named[0], []
    if where.startswith("data.val_path"):
        found = groups[VALIDATION] or (named[-1] if not groups[TRAIN] else [])
        verb, rest = "validate", list[Path]()
    else:
        found, rest = groups[TRAIN] or groups[""], groups[VALIDATION]
        verb = "train"
    if not found:
        names = shorten_list([each.name for group in named for each in group])
        raise UsageError(f"{where}: no files to {verb} on, but {names}; name those to read")
    return found, rest


def _check_is_one_set(groups: dict[str, list[Path]], root: Path, where: str) -> None:
    is_dict, card = (root / "dataset_dict.json").is_file(), root / "README.md"
    found = set[str]()
    for file in groups[TRAIN] or (groups[""] if is_dict else []):
        *folders, name = file.relative_to(root).parts
        at = next((n for n, each in enumerate(folders) if _splits_of([each])), None)
        shard = _SHARD.fullmatch(name) if at is None and not is_dict else None
        above = folders if at is None else folders[: at + is_dict]
        found.add("/".join([*above, shard[1]] if shard else above))
    start = _start(card).decode("utf-8", "replace") if card.is_file() else ""
    configs = {*_CONFIG.findall(start.split("---")[1])} if start.startswith("---") else set()
    found |= configs if len(configs) > 1 else set()
    if len(found) > 1:
        names = sorted(each or "." for each in found)
        way = "name the directory or the files of one of them"
        raise UsageError(f"{where}: several sets to train on, {shorten_list(names)}; {way}")
