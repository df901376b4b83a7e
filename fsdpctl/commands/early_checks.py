"""Checks of paths and launch settings before torch is imported, which takes seconds."""

import re
from pathlib import Path

from fsdpctl.config.data import TOKENS, DataConfig
from fsdpctl.config.data_sources import sources_in
from fsdpctl.config.options import first_comment
from fsdpctl.config.recipe import find_recipe, recipe_names
from fsdpctl.config.schema import Config
from fsdpctl.data.find_data import HUB, check_tokenizer_paths, find_data
from fsdpctl.errors import UsageError
from fsdpctl.io.files import nearest_path_hint
from fsdpctl.io.run_files import check_run_dir
from fsdpctl.io.stores import is_remote
from fsdpctl.resolve.launchers import check_nodes


def check_paths(config: Config, recipe: str | None, resume: str) -> None:
    """Check the paths of a run and the settings of its nodes.

    A process that does not prepare the run only checks data on the Hub, which each node fetches.
    UsageError if a path is invalid; the message names its key.
    """
    check_nodes(config.launch)
    if config.launch.name != "local" or config.launch.node_rank:
        _check_data(config.data, HUB)
        return
    is_path = resume not in ("auto", "never") and not is_remote(resume, f"--resume {resume}")
    if is_path and not Path(resume).expanduser().exists():
        hint = nearest_path_hint(resume) or "; expected auto, never, or a run or checkpoint"
        raise UsageError(f"--resume {resume}: not found{hint}")
    if (run_dir := config.train.run_dir) is not None:
        if is_remote(run_dir, location := f"train.run_dir={run_dir}"):
            raise UsageError(f"{location}: expected a local directory; checkpoint.remote uploads")
        check_run_dir(Path(run_dir))
    check_tokenizer_paths(config.data)
    try:
        _check_data(config.data)
    except UsageError as error:
        raise UsageError(f"{error}{_download_hint(recipe, str(config.data.path))}") from None


def _check_data(config: DataConfig, prefix: str = "") -> None:
    for key, path in (("data.path", config.path), ("data.val_path", config.val_path)):
        if path is None or prefix not in path or config.name == "python_stdlib":
            continue
        for source in sources_in(path, key):
            if source.path.startswith(prefix):
                is_in_store = is_remote(source.path, f"{key}={source.path}")
                if not (is_in_store and config.name == TOKENS):
                    find_data(source.path, key, config.name)


def _download_hint(recipe: str | None, path: str) -> str:
    if recipe not in recipe_names() or Path(path).exists():
        return ""
    url = re.search(r"https://\S+", first_comment(find_recipe(recipe)))
    return f"; to download it, run `curl -o {path} {url[0]}`" if url else ""
