"""Check a command line with the program that it starts, until the work would begin."""

import argparse
import importlib
import re
import sys
import tomllib
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner

from fsdpctl.commands.app import COMMANDS, app
from fsdpctl.config.options import option_contents, options_of
from fsdpctl.config.recipe import find_recipe, read_recipe, recipe_names
from fsdpctl.config.schema import GROUPS
from fsdpctl.errors import FsdpctlError
from tests.documented.lines import ROOT, Line

ADDRESS = "$FSDPCTL"  # the package's address, a shell variable of the reader
# Functions that begin the work of a command, after it has read all options and settings.
_WORK = (
    "fsdpctl.commands.train._train", "fsdpctl.commands.train._dry_run",
    "fsdpctl.commands.estimate_work.estimates_of",
    "fsdpctl.commands.compare.command.measure", "fsdpctl.commands.compare.command.predict",
    "fsdpctl.resolve.prepare.prepare", "fsdpctl.commands.evaluate.prepare",
    "fsdpctl.commands.sample.sample_text", "fsdpctl.commands.sample._chat",
    "fsdpctl.commands.consolidate.consolidate",
    "fsdpctl.commands.checkpoint.write_sharded_weights", "fsdpctl.commands.consolidate.write_gguf",
    "fsdpctl.checkpoint.peft.write_peft", "fsdpctl.checkpoint.verify_export.verify_export",
    "fsdpctl.io.hub_upload.UploadTarget.check",
    "fsdpctl.commands.training_data.samples_of_step",
    "fsdpctl.commands.status.read_status", "fsdpctl.commands.compare_runs.compare_run_dirs",
)  # fmt: skip
# Import all modules now: an import while functions are replaced would keep the replacements.
for _each in COMMANDS.values():
    importlib.import_module(f"fsdpctl.commands.{_each.module}")


class BegunError(Exception):
    """An exception: the command line is valid, and the work would begin."""


def read_options(lines: Sequence[Line]) -> None:
    """Read the options of lines and recipes together: reading each alone takes most of the time."""
    pairs = [arg.partition("=")[::2] for line in lines for arg in line.args]
    for name in recipe_names():
        pairs += read_recipe(find_recipe(name))
    options = {
        group: [each for each in options_of(group) if each in values]
        for group in GROUPS
        if (values := {each for name, text in pairs if name == group for each in text.split(",")})
    }
    for number in range(max(map(len, options.values()))):
        option_contents({name: x[number % len(x)] for name, x in options.items() if x})


def problem_of(line: Line) -> str | None:
    """Return the problem of a line, in a directory with its inputs; None if it is valid."""
    program, *args = line.args
    if program == "fsdpctl":
        return _of_fsdpctl(args)
    if program == "make":
        return _of_make(args)
    if program in ("pip", "uv"):
        return _of_pip(args)
    if program in ("uvx", "pipx") and ADDRESS not in args:
        return f"expected {ADDRESS}"
    if program in ("python", "torchrun") or "fsdpctl" in args:
        return _of_launched(program, args)
    return _of_files(args)


def _of_fsdpctl(args: Sequence[str]) -> str | None:
    if len(args) == 1 and args[0] in COMMANDS:
        return None  # the name of a command in a sentence
    if args[0].startswith("-"):
        known = {opt for param in typer.main.get_command(app).params for opt in param.opts}
        return None if args[0] in {*known, "--help"} else f"{args[0]}: no such option"
    with ExitStack() as stack:
        for name in _WORK:
            stack.enter_context(mock.patch(name, side_effect=BegunError))
        result = CliRunner().invoke(app, list(args))
    if "of the recipe ignored" in result.output:
        return result.output  # the line contradicts its recipe
    if isinstance(result.exception, BegunError) or result.exit_code == 0:
        return None
    if isinstance(result.exception, FsdpctlError | SystemExit):
        return f"{result.exception}\n{result.output}"
    raise result.exception or AssertionError(result.output)


def _of_make(args: Sequence[str]) -> str | None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    for arg in args:
        name, equals, _ = arg.partition("=")
        if not (f"$({name})" in makefile if equals else name in targets):
            return f"{arg}: no such target or variable"
    return None


def _of_pip(args: Sequence[str]) -> str | None:
    """Check the packages that are installed; each option has a value."""
    if args == ["build"]:
        return None
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = options["optional-dependencies"]
    known = {re.split(r"[<>=]", each)[0] for of in extras.values() for each in of}
    known |= {ADDRESS, *(f"fsdpctl[{each}]" for each in extras)}
    for before, arg in pairwise(args[args.index("install") :]):
        is_option = before.startswith("-") or arg.startswith("-")
        if not is_option and arg not in known:
            return f"{arg}: no such package"
    return None


def _of_launched(program: str, args: Sequence[str]) -> str | None:
    """Check what a launcher of ranks, or Python, runs: fsdpctl, a module or a file."""
    if "fsdpctl" in args:
        return _of_fsdpctl(args[len(args) - args[::-1].index("fsdpctl") :])
    if program == "torchrun":
        args = args[2:] if args[0] == "--nproc-per-node" else [f"{program} {args[0]}"]
    file = args[1].replace(".", "/") + ".py" if args[0] == "-m" else args[0]
    arguments = args[2 if args[0] == "-m" else 1 :]
    if file == "benchmarks/NAME.py":
        return None
    if not (ROOT / file).is_file():
        return f"{file}: not found"
    if not re.search(r"\bargparse\b|\barguments\(", (ROOT / file).read_text()):
        return None  # its arguments are positional
    return _of_parser(file.removesuffix(".py").replace("/", "."), arguments)


def _of_parser(module: str, arguments: Sequence[str]) -> str | None:
    """Check options and their values by the module's own parser."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: Any, *args: Any) -> Any:
        parse(parser, *args)
        raise BegunError

    with (
        warnings.catch_warnings(action="ignore"),  # modules that torch imports warn
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "argv", [module, *arguments]),
        suppress(BegunError),
    ):
        try:
            importlib.import_module(module).main()
        except SystemExit:
            return f"{module}: {' '.join(arguments)} not accepted"
    return None


def _of_files(args: Sequence[str]) -> str | None:
    """Check the file that the program of a cluster starts, and the arguments of the file."""
    for at, arg in enumerate(args):
        if "/" in arg:
            if not (ROOT / arg).is_file():
                return f"{arg}: not found"
            passed_on = args[at + 1 :]
            return _of_fsdpctl(["train", "launch=slurm", *passed_on]) if passed_on else None
    return None
