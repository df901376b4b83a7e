"""`fsdpctl tokenize` and `fsdpctl data`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.cli.console import say
from fsdpctl.errors import UsageError
from fsdpctl.io.files import refusing


def tokenize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Text file, directory or glob.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST.bin", help="Token file; its header is DST.json.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|DIR", help="Tokenizer: bytes, or a directory.")
    ] = "bytes",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Tokenize text into a token file."""
    from fsdpctl.data.files import left_out, read_text
    from fsdpctl.data.token_files import write_token_file
    from fsdpctl.data.tokenizer import open_tokenizer

    if not source:
        raise UsageError("SRC: empty; expected a file, a directory or a glob")
    if destination.suffix != ".bin":
        raise UsageError(f"{destination}: expected a name that ends in .bin")
    for file in (destination, destination.with_suffix(".json")):
        if file.exists() and not overwrite:
            raise UsageError(f"{file}: already exists; pass --overwrite to replace it")
    text = read_text(source, "SRC")
    chosen = open_tokenizer(tokenizer)
    tokens = chosen.encode(text)
    with refusing(destination):
        write_token_file(destination, tokens, chosen, num_bytes=text.num_bytes)
    say(
        f"{destination}: {len(tokens):,} tokens of {text.num_bytes:,} bytes{left_out(text.skipped)}"
    )


def data(
    step: Annotated[int, typer.Option(min=1, help="Step, starting at 1.")],
    run: Annotated[Path, typer.Option(metavar="DIR", help="Run directory.")] = Path("runs/latest"),
    rank: Annotated[
        int | None, typer.Option(min=0, help="Show the samples of this rank only, if known.")
    ] = None,
) -> None:
    """Show the training samples of one step.

    Also shows why the step was skipped or rolled back, if it was.
    """
    from fsdpctl.tools.samples import samples_of_step

    found = samples_of_step(run, step)
    say(f"step {step}: {len(found.samples)} samples{found.about and '; '}{found.about}")
    for sample in found.samples:
        if rank is None or rank in sample.ranks:
            names = ", ".join(map(str, sample.ranks))
            whose = f" (rank{'s' * (len(sample.ranks) > 1)} {names})" if names else ""
            say(f"--- sample {sample.number}{whose}\n{sample.text}")
