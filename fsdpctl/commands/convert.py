"""`fsdpctl convert`: a recipe from another tool's configuration; `train --from` uses it."""

from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.commands.config_args import ConfigArguments, Settings, normalized
from fsdpctl.commands.console import emit, note
from fsdpctl.config.compose import checked_settings
from fsdpctl.errors import UsageError
from fsdpctl.importers.recipe import ConvertedRecipe, read_others, recipe_text
from fsdpctl.importers.recipe import convert as to_recipe
from fsdpctl.io.texts import escaped

Source = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Configuration of axolotl, accelerate or TRL."),
]


def convert(
    source: Source,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="File to write, which must not exist.")
    ] = None,
) -> None:
    """Write a recipe from another tool's file.

    The recipe sets what the file describes: model, data, lengths, batch, optimizer, schedule, LoRA
    and sharding. Comments list what it leaves out, with the reason.
    """
    words = normalized(settings).settings
    recipe = converted(source, words)
    text = escaped(recipe_text(recipe, source.name))  # of values; comments are printable
    if out is None:
        emit(text.rstrip("\n"))
    else:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UsageError(f"--out {out}: already exists; choose another name") from None
        run_it = "" if recipe.required else f"; run it: fsdpctl train {out}"
        note(f"{out}: {len(recipe.rows)} settings{run_it}")
    for _, why in recipe.missing:
        note(f"missing: {why}")


def converted(source: Path, words: list[str]) -> ConvertedRecipe:
    """Return the recipe for a file of another tool, with settings of the command line."""
    from fsdpctl.resolve.place import ranks_here

    typed = dict(checked_settings(words))
    ranks = ranks_here(typed.get("launch.device", "auto"))
    return to_recipe(read_others(source.expanduser()), typed, ranks)


def words_beside(source: Path, asked: ConfigArguments) -> list[str]:
    """Return the settings of the command line; UsageError if it has a recipe too."""
    if asked.recipe is not None:
        raise UsageError(
            f"--from {source}: conflicts with the recipe {asked.recipe}; pass only one"
        )
    return asked.settings
