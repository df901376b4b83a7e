"""`fsdpctl profile-device`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.cli.config_args import ConfigArguments, RanksPerNode, Settings, normalized
from fsdpctl.cli.console import say
from fsdpctl.errors import UsageError

Out = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it, as JSON.")]


def profile_device(out: Out, words: Settings = None, nproc_per_node: RanksPerNode = None) -> None:
    """Measure this machine, so that the time of a step can be foreseen on it.

    Operators of real models, copies, the optimizer, collectives between the ranks, and how they
    slow each other down: two minutes, in which nothing else should run. Then
    `fsdpctl compare --simulate cluster.profile=FILE …` knows it.
    """
    from fsdpctl.config.compose import compose_config
    from fsdpctl.resolve.machine import placed_here
    from fsdpctl.tools.profile_device import profile_device as measure

    if out.exists():
        raise UsageError(f"{out}: exists already; name another file")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: its folder does not exist")
    asked = normalized(ConfigArguments(words), nproc_per_node)
    found = measure(placed_here(compose_config(list(asked.settings or [])).config))
    with out.open("x", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found), indent=1) + "\n")
    say(f"{out}: {found.device}, {found.ranks} ranks, {len(found.operators)} operators")
