"""`fsdpctl tokenize` and `fsdpctl data`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.cli.console import say
from fsdpctl.errors import UsageError


def tokenize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A text file, directory or glob.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST.bin", help="The token file; DST.json describes it.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|DIR", help="DIR has a tokenizer.json.")
    ] = "bytes",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.bin.")] = False,
) -> None:
    """Make a token file for `data=tokens` of text."""
    from fsdpctl.data.files import left_out, read_text
    from fsdpctl.data.tokenizer import open_tokenizer
    from fsdpctl.data.tokens import write_token_file

    if not source:
        raise UsageError("SRC: is empty; give a file, a directory or a glob")
    if destination.suffix != ".bin":
        raise UsageError(f"{destination}: the name of a token file ends in .bin")
    for file in (destination, destination.with_suffix(".json")):
        if file.exists() and not overwrite:
            raise UsageError(f"{file}: exists already; --overwrite replaces it")
    text = read_text(source, "SRC")
    chosen = open_tokenizer(tokenizer)
    tokens = chosen.encode(text)
    try:
        write_token_file(destination, tokens, chosen, num_bytes=text.num_bytes)
    except OSError as error:
        raise UsageError(f"{destination}: {error.strerror or error}") from None
    say(f"{destination}: {len(tokens):,} tokens of {text.num_bytes:,} bytes{left_out(text)}")


def data(
    step: Annotated[int, typer.Option(min=1, help="Which step, counted from 1.")],
    run: Annotated[Path, typer.Option(metavar="DIR", help="The run.")] = Path("runs/latest"),
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only what this rank had, where that is known.")
    ] = None,
) -> None:
    """Show what a run was trained on in a step, as text, and why the step was left out if it was.

    The samples of steps that were not applied, or from which the run went back, are on record.
    """
    from fsdpctl.tools.samples import samples_of_step

    found = samples_of_step(run, step)
    say(f"step {step}: {len(found.samples)} samples{found.about and '; '}{found.about}")
    for sample in found.samples:
        if rank is None or sample.rank == rank:
            whose = "" if sample.rank is None else f" (rank {sample.rank})"
            say(f"--- sample {sample.number}{whose}\n{sample.text}")
