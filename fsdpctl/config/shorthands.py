"""Shorthands of settings: names of models, GPUs such as 8xh100, kinds of data, other strategies."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fsdpctl.config.data_files import kind_of_path
from fsdpctl.config.data_sources import sources_in
from fsdpctl.config.hub import hub_models
from fsdpctl.config.keys import Setting, Settings
from fsdpctl.config.options import options_of, ranks_per_node
from fsdpctl.errors import UsageError, did_you_mean
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.plan.strategy import STRATEGY_ALIASES

RANK_KEYS = ("launch.nproc_per_node", "launch.nnodes")
_GPUS = re.compile(r"(\d{1,7})[xX×*]([\w-]+)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a name on the Hub, and is not an existing path."""
    return _HUB_NAME.fullmatch(text) is not None and not Path(text).expanduser().exists()


def is_model_name(text: str) -> bool:
    """Return whether a text without a key is a model: a name on the Hub, a directory or a file."""
    name, path = text.partition("@")[0], Path(text).expanduser()
    if is_hub_name(text):  # a name that is only similar to a known one is taken for a typo
        return name in hub_models() or not did_you_mean(name, hub_models())
    return is_gguf(path) or (path / "config.json").is_file()


def expand_shorthands(pairs: Sequence[Setting], recipe: Sequence[Setting]) -> list[Setting]:
    """Replace the shorthands in settings; `recipe` are the settings that they override.

    UsageError if a number of GPUs isn't a number of full nodes, or conflicts with set ranks.
    """
    texts = dict(pairs)
    expanded: list[Setting] = []
    for name, text in pairs:
        if name == "model" and ("/" in text or is_model_name(text)):
            expanded += [("model", "hf"), ("model.path", text)]
        elif name == "cluster" and (match := _GPUS.fullmatch(text)) is not None:
            expanded += _cluster_settings(text, int(match[1]), _cluster_name(match[2]), texts)
        elif name == "cluster":
            expanded.append((name, _cluster_name(text)))
        else:
            expanded.append((name, text))
    path = texts.get("data.path")
    if path is not None and "data" not in {**dict(recipe), **texts}:
        first = sources_in(path)[0].path if path else path  # the first source decides
        expanded.append(("data", kind_of_path(os.path.expanduser(first))))
    return expanded


def _cluster_name(text: str) -> str:
    return next((x for x in options_of("cluster") if x == text.lower()), text)


def _cluster_settings(text: str, count: int, cluster: str, texts: Settings) -> list[Setting]:
    if clash := next((key for key in RANK_KEYS if key in texts), None):
        advice = f"set the ranks with one of them, such as cluster={cluster} and {clash}"
        raise UsageError(f"cluster={text}: conflicts with {clash}; {advice}")
    per_node = ranks_per_node(cluster)
    if per_node is None or count <= per_node:
        return [("cluster", cluster), *zip(RANK_KEYS, (str(count), "1"), strict=True)]
    if count % per_node:
        expected = f"a number up to {per_node}, or a multiple of it"
        expected += f": a node of {cluster} has {per_node} GPUs"
        raise UsageError(f"cluster={text}: expected {expected}")
    ranks = (str(per_node), str(count // per_node))
    return [("cluster", cluster), *zip(RANK_KEYS, ranks, strict=True)]


def translate_strategy(pairs: list[Setting]) -> tuple[list[Setting], tuple[str, ...]]:
    """Replace the name of a strategy in another tool; also return a line that names both."""
    typed = dict(pairs).get("strategy", "")
    strategy = STRATEGY_ALIASES.get(typed.lower(), typed)
    if strategy == typed:
        return pairs, ()
    pairs = [(name, strategy if name == "strategy" else text) for name, text in pairs]
    return pairs, (f"strategy={typed}: runs as {strategy}",)
