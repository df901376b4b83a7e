"""The files of conf/: the options of each group, with the values of their keys."""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from fsdpctl.config.clusters import PRICE_SOURCE
from fsdpctl.config.keys import Setting, Value
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.io.files import read_text_file
from fsdpctl.io.packages import package_folder


def first_comment(file: Path) -> str:
    """Return the comment at the beginning of a YAML file, which describes the file."""
    lines = read_text_file(file, follow_links=True).splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


def options_of(group: str) -> list[str]:
    """Return the names of the options of a group."""
    return sorted(file.stem for file in (package_folder("conf") / group).glob("*.yaml"))


def ranks_per_node(cluster: str) -> int | None:
    """Return the ranks of a node of a named cluster; None if there is no such cluster."""
    if cluster not in options_of("cluster"):
        return None
    ranks = option_contents({"cluster": cluster})["cluster"].get("ranks_per_node")
    return ranks if isinstance(ranks, int) else None


def option_values(selected: Mapping[str, str]) -> dict[str, Value]:
    """Return the value of each key; groups that `choices` lacks have their default option."""
    defaults = {name: key.default for name, key in KEYS.items()}
    return defaults | {name: KEYS[name].parse(text) for name, text in option_settings(selected)}


def option_settings(selected: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the settings in the files of the selected options."""
    for section, content in option_contents(selected).items():
        for key, value in content.items():
            if key not in ("name", "device_names", PRICE_SOURCE):
                text = str(value).lower() if isinstance(value, bool) else str(value)
                yield f"{section}.{key}", text


# The content of an option's file, by group and option. None is the default option of the group.
_contents: dict[tuple[str, str | None], Mapping[str, Any]] = {}


def option_contents(selected: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the content of the selected file of each group. A process reads each file once."""
    options = [(group, selected.get(group)) for group in GROUPS]
    if not all(each in _contents for each in options):
        # Hydra takes 0.2 s to import; unknown keys are reported without it.
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        conf = str(package_folder("conf").resolve())
        with initialize_config_dir(conf, version_base="1.3"):
            overrides = [f"{group}={option}" for group, option in selected.items()]
            composed: Any = OmegaConf.to_container(compose("config", overrides))
        _contents.update({each: composed.get(each[0]) or {} for each in options})
    return {group: _contents[group, option] for group, option in options}
