"""Recipes, which are YAML files of settings; files of other tools are detected and refused."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from fsdpctl.config.keys import Setting
from fsdpctl.config.options import options_of
from fsdpctl.config.schema import BATCH_KEYS, GROUPS, KEYS, LENGTH_KEYS
from fsdpctl.errors import UsageError, did_you_mean, shorten_list
from fsdpctl.io.files import nearest_path_hint, read_text_file
from fsdpctl.io.packages import package_folder
from fsdpctl.io.untrusted import read_yaml

MISSING = "???"  # Hydra's mark of a required value
MISSING_REASON = "MISSING: "  # begins the comment above a required value, which has the reason
# Keys that only files of one tool have, for tools whose files fsdpctl reads.
_READ_TOOLS = {
    "base_model": "axolotl", "compute_environment": "accelerate", "distributed_type": "accelerate",
    "model_name_or_path": "TRL", "fsdp_config": "accelerate", "deepspeed_config": "accelerate",
}  # fmt: skip
# Keys of tools whose files fsdpctl does not read. They take precedence over `_KNOWN_BY`.
_UNREAD_TOOLS = {
    "stage": "LLaMA-Factory", "finetuning_type": "LLaMA-Factory", "template": "LLaMA-Factory",
    "peft_config": "LLaMA-Factory", "dist_config": "LLaMA-Factory", "actor_rollout_ref": "verl",
    "litgpt": "litgpt", "lr_warmup_fraction": "litgpt", "model._component_": "torchtune",
    "checkpointer._component_": "torchtune", "step_scheduler": "NeMo Automodel",
}  # fmt: skip
NO_TOML = "TOML files, such as torchtitan's, are not read; set fsdpctl's keys (docs/from-others.md)"
YAML_NULLS = ("", "null", "~")  # texts of YAML's null, which `read_yaml` does not convert
_JSON_KEYS = ("model.overrides.", "data.new_tokens")  # keys whose lists are JSON


def recipe_names() -> list[str]:
    return sorted(file.stem for file in package_folder("recipes").glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """Return the file of a recipe for its name or path; UsageError if it doesn't exist."""
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


def read_recipe(path: Path) -> list[Setting]:
    """Return the settings of a recipe in the order of the file.

    UsageError if the file isn't a YAML mapping of keys to plain values, or is another tool's file.
    """
    content = read_yaml(path)
    if (tool := tool_of(path, content)) is not None:
        unknown = [
            key
            for key, value in flat_items(content)
            if key not in (*KEYS, *GROUPS) and str(value).strip().lower() not in YAML_NULLS
        ]
        problem = f"a recipe has fsdpctl's keys instead of {shorten_list(unknown)}"
        next_step = f"pass it as --from {path}, or write a recipe with `fsdpctl convert`"
        raise UsageError(f"{path}: a file of {tool}; {next_step}; {problem}")
    return list(_flatten(path, "", content))


def without_missing(path: Path, pairs: Sequence[Setting], typed: Collection[str]) -> list[Setting]:
    """Return the settings of a recipe without missing values that the command line replaces.

    `typed` are the names on the command line. UsageError if another value is missing; the
    message has the reason from the comment above the value.
    """
    replaced = set[str]()
    for alternatives in (LENGTH_KEYS, BATCH_KEYS):
        replaced |= {*alternatives} if {*alternatives} & {*typed} else set()
    remaining = [(name, text) for name, text in pairs if text != MISSING or name not in replaced]
    for name, text in remaining:
        if text == MISSING and (name in (*KEYS, *GROUPS) or name.startswith(_JSON_KEYS)):
            options = shorten_list(options_of(name)) or "a value"
            expected = KEYS[name].expected if name in KEYS else options
            reason = _reason(path, name)
            why = f": {reason}" if reason else f"; expected {expected}"
            raise UsageError(f"{path}: {name} is missing{why}")
    return remaining


def _reason(path: Path, name: str) -> str:
    above, mark, _ = read_text_file(path, follow_links=True).partition(f"\n{name}: {MISSING}")
    lines = takewhile(lambda line: line.startswith("#"), reversed(above.splitlines()))
    comment = " ".join(line.lstrip("# ").rstrip() for line in reversed([*lines]))
    return comment.rpartition(MISSING_REASON)[2] if mark and MISSING_REASON in comment else ""


def _flatten(path: Path, prefix: str, content: object) -> Iterator[Setting]:
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a mapping of keys to values")
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            inner = dict(value)
            if "name" in inner:
                yield name, str(inner.pop("name"))
            yield from _flatten(path, f"{name}.", inner)
        elif isinstance(value, str):
            yield name, value
        elif name.startswith(_JSON_KEYS) and isinstance(value, list):
            yield name, json.dumps(value)
        elif name in KEYS and KEYS[name].is_list and isinstance(value, list):
            yield name, f"[{', '.join(map(str, value))}]"
        elif name in KEYS or name in GROUPS:
            raise UsageError(f"{path}: {name}: expected a plain value")
        else:
            yield name, ""  # an unknown name, which `compose_config` reports


def tool_of(file: Path, content: object) -> str | None:
    """Return the tool that a YAML file belongs to; None if it is not one of the known tools.

    UsageError if the content isn't a mapping, or if fsdpctl does not read files of this tool.
    """
    if not isinstance(content, Mapping):
        raise UsageError(f"{file}: expected a mapping of keys to values")
    keys = [f"{key}." for key, _ in flat_items(content)]
    for name, tool in (_UNREAD_TOOLS | _READ_TOOLS).items():
        if any(key.startswith(f"{name}.") for key in keys):
            if name in _READ_TOOLS:
                return tool
            advice = "write a recipe; the error for each unknown key names fsdpctl's key"
            raise UsageError(f"{file}: a file of {tool}: not supported; {advice}")
    return None


def flat_items(content: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested mappings."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
