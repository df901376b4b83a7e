"""The YAML files of settings: options in conf/, and recipes."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import fsdpctl
from fsdpctl.config.schema import GROUPS, KEYS, LENGTHS, SIZES
from fsdpctl.config.source_config import NO_TOML, SourceConfig, tool_of
from fsdpctl.errors import UsageError, did_you_mean, shorten_list
from fsdpctl.io.files import nearest_path_hint, read_text_file
from fsdpctl.io.untrusted import read_yaml

PRICED = "priced"  # in the file of a cluster: who asks its price, on which day
MISSING = "???"  # as Hydra marks a value that is required
OF_MISSING = "MISSING: "  # before the reason, in a comment above such a value
_OF_JSON = ("model.overrides.", "data.new_tokens")  # keys whose lists are JSON


def package_folder(name: str) -> Path:
    """Return the directory `conf` or `recipes`: within an installed package, else next to it."""
    package = Path(fsdpctl.__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def first_comment(file: Path) -> str:
    """Return the comment at the beginning of a YAML file, which describes it."""
    lines = read_text_file(file, follow_links=True).splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


def choices_of(group: str) -> list[str]:
    return sorted(file.stem for file in (package_folder("conf") / group).glob("*.yaml"))


class Gpu(NamedTuple):
    """A GPU of a named cluster."""

    cluster: str
    peak: float  # dense FLOP/s in bf16, by its data sheet


@cache
def known_gpu(device_name: str) -> Gpu | None:
    found = {}
    for cluster, content in _clusters():
        for name in content.get("device_names", ()):
            if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
                found[name] = Gpu(cluster, float(content["flops"]) * 1e12)
    return found[max(found, key=len)] if found else None  # A100-SXM4-40GB rather than A100


def cards_with(size: str) -> list[str]:
    """Return the clusters whose GPUs have this nominal memory, such as 24 or 24GB."""
    digits = size.lower().rstrip("gib")
    most = float(digits) if digits.isdecimal() else 0.0
    # A part of the memory is reserved.
    return [x for x, about in _clusters() if 0.9 * most < float(about.get("memory", 0)) <= most]


def clusters_like(text: str) -> list[str]:
    """Return the clusters that a spelling such as A100 or H100-80GB may mean."""
    word = text.lower()
    model = re.search(r"[a-z]+[-_ ]?\d+", word)  # a100 is neither a10 nor one of two
    start, word = (re.sub(r"[-_ ]", "", each) for each in (model[0] if model else word, word))
    similar = [x for x, _ in _clusters() if start and x.replace("_", "").startswith(start)]
    whole = [x for x in similar if all(part in word for part in x.split("_"))]
    return [max(whole, key=len)] if whole else similar


def price_source(cluster: str) -> str:
    """Return who asks the price of a cluster's file, and the day; empty if it has none."""
    file = package_folder("conf") / "cluster" / f"{cluster}.yaml"
    about: Any = read_yaml(file) or {}
    return str(about.get(PRICED, ""))


def _clusters() -> Iterator[tuple[str, Any]]:
    for file in sorted((package_folder("conf") / "cluster").glob("*.yaml")):
        yield file.stem, read_yaml(file) or {}


def recipe_names() -> list[str]:
    return sorted(file.stem for file in package_folder("recipes").glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given by its name or path; UsageError if it doesn't exist."""
    if name in recipe_names():
        return package_folder("recipes") / f"{name}.yaml"
    if name.endswith(".toml"):
        raise UsageError(f"{name}: {NO_TOML}")
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix:
        raise UsageError(f"{name}: no such file{nearest_path_hint(name)}")
    names = recipe_names()
    problem = f"no such recipe or file{did_you_mean(name, names)} ({', '.join(names)})"
    raise UsageError(f"--recipe {name}: {problem}")


def read_recipe(path: Path) -> list[tuple[str, str]]:
    """Return the settings of a recipe, in its order.

    UsageError if the file isn't a YAML mapping of keys to plain values, or if it is another tool's.
    """
    content = read_yaml(path)
    source = SourceConfig(path, content)
    if (tool := tool_of(source)) is not None:
        unknown = [each.key for each in source.peek() if each.key not in (*KEYS, *GROUPS)]
        raise UsageError(
            f"{path}: a file of {tool}; pass it as --from {path}, or write a recipe with `fsdpctl "
            f"convert`; a recipe has fsdpctl's names instead of {shorten_list(unknown)}"
        )
    return list(_flatten(path, "", content))


def without_missing(
    path: Path, words: Sequence[tuple[str, str]], given: Collection[str]
) -> list[tuple[str, str]]:
    """Return the settings of a recipe without missing ones that others, which are `given`, replace.

    UsageError if another value is missing; with the reason in the comment above it.
    """
    replaced = {name for each in (LENGTHS, SIZES) if {*each} & {*given} for name in each}
    kept = [(name, text) for name, text in words if text != MISSING or name not in replaced]
    for name, text in kept:
        if text == MISSING and (name in (*KEYS, *GROUPS) or name.startswith(_OF_JSON)):
            known = (
                KEYS[name].expected if name in KEYS else shorten_list(choices_of(name)) or "a value"
            )
            why = f": {reason}" if (reason := _reason(path, name)) else f"; expected {known}"
            raise UsageError(f"{path}: {name} is missing{why}")
    return kept


def _reason(path: Path, name: str) -> str:
    above, found, _ = read_text_file(path, follow_links=True).partition(f"\n{name}: {MISSING}")
    lines = takewhile(lambda line: line.startswith("#"), reversed(above.splitlines()))
    comment = " ".join(line.lstrip("# ").rstrip() for line in reversed([*lines]))
    return comment.rpartition(OF_MISSING)[2] if found and OF_MISSING in comment else ""


def _flatten(path: Path, prefix: str, content: object) -> Iterator[tuple[str, str]]:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a mapping of keys to values")
    for word, value in content.items():
        name = f"{prefix}{word}"
        if isinstance(value, dict):
            inner = dict(value)
            if "name" in inner:
                yield name, str(inner.pop("name"))
            yield from _flatten(path, f"{name}.", inner)
        elif isinstance(value, str):
            yield name, value
        elif name.startswith(_OF_JSON) and isinstance(value, list):
            yield name, json.dumps(value)
        elif name in KEYS and KEYS[name].is_names and isinstance(value, list):
            yield name, f"[{', '.join(map(str, value))}]"
        elif name in KEYS or name in GROUPS:
            raise UsageError(f"{path}: {name}: expected a plain value")
        else:
            yield name, ""  # unknown; reported later
