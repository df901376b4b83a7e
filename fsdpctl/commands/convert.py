"""`fsdpctl convert` writes a recipe from another tool's file; `train --from` trains with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.commands.config_args import ConfigArguments, SettingArgs, normalize
from fsdpctl.commands.printing import emit, note
from fsdpctl.config.compose import parse_settings
from fsdpctl.errors import UsageError
from fsdpctl.importers.convert import UNUSED, ConvertedRecipe, recipe_text, to_recipe
from fsdpctl.importers.readers import read_other_tool
from fsdpctl.io.texts import escaped

FileArg = Annotated[
    Path, typer.Argument(metavar="FILE", help="Configuration of axolotl, accelerate or TRL.")
]


def convert(
    source: FileArg,
    settings: SettingArgs = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="File to write, which must not exist.")
    ] = None,
) -> None:
    """Write a recipe from another tool's file.

    If accelerate launches the tool, pass accelerate's file too. The recipe sets model, data,
    lengths, batch, optimizer, schedule, LoRA and sharding as in the files. Comments list the
    omitted keys with the reason.
    """
    overrides, launch_file = normalize(settings)
    files = [source, *([Path(launch_file)] if launch_file else [])]
    recipe = convert_files(files, overrides)
    # Values may contain control characters, which are escaped. Comments are printable.
    text = escaped(recipe_text(recipe, " and ".join(each.name for each in files)))
    if out is None:
        emit(text.rstrip("\n"))
    else:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UsageError(f"--out {out}: already exists; choose another name") from None
        next_step = "" if recipe.required else f"; run it: fsdpctl train {out}"
        note(f"{out}: {len(recipe.rows)} settings{next_step}")
    note(*describe_omissions(recipe))


def describe_omissions(recipe: ConvertedRecipe) -> list[str]:
    """Return lines about missing settings, and about omitted keys that affect the training."""
    omitted = [each for each in recipe.left_out if not each.startswith(UNUSED)]
    return [*(f"missing: {why}" for _, why in recipe.missing), *(f"left out: {x}" for x in omitted)]


def convert_files(files: Sequence[Path], overrides: list[str]) -> ConvertedRecipe:
    """Return the recipe for one or two files of other tools, with command-line overrides."""
    from fsdpctl.resolve.machine import num_ranks_of

    if len(files) > 2:
        raise UsageError(f"{files[2]}: expected a training file, and at most one of accelerate")
    typed = dict(parse_settings(overrides))
    return to_recipe(read_other_tool(*files), typed, num_ranks_of(typed))


def settings_without_recipe(source: Path, arguments: ConfigArguments) -> list[str]:
    """Return the command-line overrides of `--from`; UsageError if a recipe is passed too."""
    if (recipe := arguments.recipe) is not None:
        hint = f"pass only one; for a file of accelerate, add --from {recipe}"
        raise UsageError(f"--from {source}: conflicts with the recipe {recipe}; {hint}")
    return arguments.settings
