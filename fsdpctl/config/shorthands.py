"""Short forms, and names of other tools: models, GPUs of a cluster, data, strategies."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fsdpctl.config.data_files import option_of_path
from fsdpctl.config.data_sources import sources_in
from fsdpctl.config.hub import hub_models
from fsdpctl.config.keys import Setting
from fsdpctl.config.options import choices_of, ranks_per_node
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.plan.strategy import STRATEGY_ALIASES

RANK_KEYS = ("launch.nproc_per_node", "launch.nnodes")
_TIMES = re.compile(r"(\d{1,7})[xX×*]([\w-]+)")
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


def is_hub_name(word: str) -> bool:
    """Return whether a word has the form of a model's name on the Hub, and does not exist here."""
    return _NAME.fullmatch(word) is not None and not Path(word).expanduser().exists()


def is_model_name(word: str) -> bool:
    """Return whether a word without a key is a model: its name on the Hub, directory or file."""
    name, path = word.partition("@")[0], Path(word).expanduser()
    if is_hub_name(word):  # another one than a similar name's, or a typo
        return name in hub_models() or not did_you_mean(name, hub_models())
    return is_gguf(path) or (path / "config.json").is_file()


def expand_shorthands(pairs: Sequence[Setting], others: Sequence[Setting]) -> list[Setting]:
    """Replace the short forms among some settings; `others` are those of the recipe.

    UsageError if GPUs are not full nodes, or conflict with ranks.
    """
    given = dict(pairs)
    found: list[Setting] = []
    for name, text in pairs:
        if name == "model" and ("/" in text or is_model_name(text)):
            found += [("model", "hf"), ("model.path", text)]
        elif name == "cluster" and (match := _TIMES.fullmatch(text)) is not None:
            card = _option(match[2])
            found += _cluster(text, int(match[1]), card, given, ranks_per_node(card))
        elif name == "cluster":
            found.append((name, _option(text)))
        else:
            found.append((name, text))
    path = given.get("data.path")
    if path is not None and "data" not in {**dict(others), **given}:
        first = sources_in(path)[0].path if path else path
        found.append(("data", option_of_path(os.path.expanduser(first))))
    return found


def _option(cluster: str) -> str:
    return cluster.lower() if cluster.lower() in choices_of("cluster") else cluster


def _cluster(
    text: str, count: int, name: str, given: dict[str, str], per_node: int | None
) -> list[Setting]:
    if clash := next((each for each in RANK_KEYS if each in given), None):
        way = f"set the ranks with one of them, such as cluster={name} and {clash}"
        raise UsageError(f"cluster={text}: conflicts with {clash}; {way}")
    if per_node is None or count <= per_node:
        return [("cluster", name), (RANK_KEYS[0], str(count)), (RANK_KEYS[1], "1")]
    if count % per_node:
        raise UsageError(
            f"cluster={text}: expected a number up to {per_node}, or a multiple of it: a node of "
            f"{name} has {per_node} GPUs"
        )
    return [
        ("cluster", name), (RANK_KEYS[0], str(per_node)), (RANK_KEYS[1], str(count // per_node))
    ]  # fmt: skip


def translate_strategy(pairs: list[Setting]) -> tuple[list[Setting], tuple[str, ...]]:
    """Replace another tool's name of a strategy; also return a line about it."""
    asked = dict(pairs).get("strategy", "")
    ours = STRATEGY_ALIASES.get(asked.lower(), asked)
    if ours == asked:
        return pairs, ()
    pairs = [(name, ours if name == "strategy" else text) for name, text in pairs]
    return pairs, (f"strategy={asked}: runs as {ours}",)
