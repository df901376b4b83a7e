"""`fsdpctl profile-device`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.cli.console import say
from fsdpctl.cli.words import Asked, RanksPerNode, Words, settled
from fsdpctl.errors import UsageError

Out = Annotated[Path, typer.Argument(metavar="FILE", help="New JSON file to write the profile to.")]


def profile_device(out: Out, words: Words = None, nproc_per_node: RanksPerNode = None) -> None:
    """Measure this machine for step-time predictions.

    Measures operators of real models, copies, the optimizer, collectives between the ranks, and
    their mutual slowdown. It takes two minutes, in which nothing else should run. Use the profile
    with `fsdpctl compare --simulate cluster.profile=FILE …`.
    """
    from fsdpctl.config.compose import compose_config
    from fsdpctl.resolve.machine import placed_here
    from fsdpctl.tools.profile_device import profile_device as measure

    if out.exists():
        raise UsageError(f"{out}: already exists; pass another file")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: directory {out.absolute().parent} not found")
    asked = settled(Asked(words), nproc_per_node)
    found = measure(placed_here(compose_config(list(asked.words or [])).config))
    with out.open("x", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found), indent=1) + "\n")
    say(f"{out}: {found.device}, {found.ranks} ranks, {len(found.operators)} operators")
