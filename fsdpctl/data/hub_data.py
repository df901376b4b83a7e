"""Data by its name on the Hugging Face Hub, found in its cache. Nothing is downloaded."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdpctl.config.data_files import TOKENIZE, is_data, select_files
from fsdpctl.config.hub_cache import cache_folder
from fsdpctl.errors import UsageError, first_of, nearest
from fsdpctl.io.files import read_text_file
from fsdpctl.io.untrusted import MIB, parse_yaml

HUB = "hf://"
_NAME = re.compile(
    r"hf://(?:datasets/)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w.-]+))?(?::(?P<config>[\w.-]+))?(?:/(?P<split>[\w.-]+))?"
)
_CARD = "README.md"
_MOST_STARS = 3  # of a pattern: matching takes time that grows with each


def hub_files(path: str, key: str) -> list[Path]:
    """Return the files of `hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]` in the cache, sorted.

    The configurations are those of the data set's card. By default, they are the one called
    default, or the only one, and the split train.

    Raises:
        UsageError: If there are none. The message has the command to download them.
    """
    match = _NAME.fullmatch(path)
    if match is None:
        raise UsageError(f"{key}={path}: expected hf://ORG/NAME[@REVISION][:CONFIG][/SPLIT]")
    name, revision, config, split = match.groups()
    at = f" --revision {revision}" if revision else ""
    fetch = f"run `hf download --repo-type dataset {name}{at}`"
    folder = cache_folder() / f"datasets--{name.replace('/', '--')}"
    if (snapshot := _snapshot(folder, revision or "main")) is None:
        raise UsageError(
            f"{key}={path}: not in the Hugging Face cache ({cache_folder()}); fsdpctl downloads "
            f"nothing, {fetch}"
        )
    files = {each.relative_to(snapshot).as_posix(): each for each in sorted(snapshot.rglob("*"))}
    files = {each: file for each, file in files.items() if is_data(file)}
    chosen = [*_chosen(snapshot, f"{key}={path}", files, (config, split))]
    if not chosen:
        raise UsageError(f"{key}={path}: no such files in {snapshot}; {fetch}")
    if missing := next((each for each in chosen if not files[each].is_file()), None):
        raise UsageError(f"{key}={path}: {missing} is missing in the Hugging Face cache; {fetch}")
    if (lacking := _lacking(chosen)) is not None:
        raise UsageError(f"{key}={path}: {lacking} is missing in the Hugging Face cache; {fetch}")
    return [files[each] for each in sorted(chosen)]


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


def _chosen(
    snapshot: Path, where: str, names: dict[str, Path], asked: tuple[str | None, str | None]
) -> Iterator[str]:
    """Yield the names of the files of a configuration and a split."""
    configs = _configs(snapshot, where)
    config, split = asked
    if not configs:
        # Without a card, directories and names tell.
        wanted = [word for word in (config, split) if word is not None]
        found = [file for name, file in names.items() if all(_has_word(name, x) for x in wanted)]
        if split is None and found:
            is_folder = config is None
            found = [*select_files(found, snapshot, where, TOKENIZE, is_folder=is_folder).train]
        yield from (each.relative_to(snapshot).as_posix() for each in found)
        return
    default = "default" if "default" in configs else next(iter(configs))
    if config is None and default != "default" and len(configs) > 1:
        raise UsageError(f"{where}: expected a configuration: {first_of(list(configs))}")
    config = config or default
    if config not in configs:
        raise UsageError(f"{where}: no configuration {config}{nearest(config, configs)}")
    splits = configs[config]
    split = split or ("train" if "train" in splits else next(iter(splits), "train"))
    if split not in splits:
        raise UsageError(f"{where}: no split {split}; expected {first_of(list(splits))}")
    if long := next((each for each in splits[split] if each.count("*") > _MOST_STARS), None):
        raise UsageError(f"{where}: {_CARD}: too many stars: {long:.80}")
    patterns = [_pattern(each) for each in splits[split]]
    yield from (each for each in names if any(pattern.fullmatch(each) for pattern in patterns))


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?:^|[-_./]){re.escape(word)}(?:[-_./]|$)", name) is not None


def _pattern(text: str) -> re.Pattern[str]:
    """Return the expression of a glob: ** for any directories, * and ? within a name."""
    words = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", text.removeprefix("./"))
    return re.compile("".join(words.get(each, re.escape(each)) for each in parts))


def _configs(snapshot: Path, where: str) -> dict[str, dict[str, list[str]]]:
    """Return the patterns of each split of each configuration on the card."""
    card = snapshot / _CARD
    if not card.is_file():
        return {}
    match = re.match(r"---\s*\n(.*?\n)---\s*\n", read_text_file(card, MIB), re.DOTALL)
    content = parse_yaml(match[1], f"{where}: {_CARD}") if match else None
    given = content.get("configs") if isinstance(content, dict) else None
    found: dict[str, dict[str, list[str]]] = {}
    for each in given if isinstance(given, list) else ():
        if isinstance(each, dict) and "data_files" in each:
            found[str(each.get("config_name", "default"))] = _splits(each["data_files"])
    return found


def _splits(given: Any) -> dict[str, list[str]]:
    if isinstance(given, str):
        return {"train": [given]}
    if isinstance(given, dict):
        return {str(split): _texts(path) for split, path in given.items()}
    found: dict[str, list[str]] = {}
    for each in given if isinstance(given, list) else ():
        if isinstance(each, dict):
            found.setdefault(str(each.get("split", "train")), []).extend(_texts(each.get("path")))
        else:
            found.setdefault("train", []).append(str(each))
    return found


def _texts(given: Any) -> list[str]:
    return [str(each) for each in given] if isinstance(given, list) else [str(given)]
