"""`fsdpctl tokenize` and `fsdpctl data`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.commands.console import say
from fsdpctl.errors import UsageError


def tokenize(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Text, JSON Lines or Parquet: file, directory, glob."),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST.bin", help="Token file; its header is DST.json.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|DIR", help="Tokenizer: bytes, or a directory.")
    ] = "bytes",
    shard_tokens: Annotated[
        int | None,
        typer.Option(min=1 << 10, metavar="N", help="Tokens of each of the files DST-00000.bin …"),
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option(min=0, metavar="SEED", help="Shuffle nearby documents.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Tokenize text into token files.

    If it is killed, the same command continues.
    """
    from fsdpctl.data.tokenizer import open_tokenizer
    from fsdpctl.data.tokenizing import Output, tokenize_files

    if not source:
        raise UsageError("SRC: empty; expected a file, a directory or a glob")
    if destination.suffix != ".bin":
        raise UsageError(f"{destination}: expected a name that ends in .bin")
    output = Output(destination, shard_tokens, shuffle)
    done = tokenize_files(source, output, open_tokenizer(tokenizer), overwrite=overwrite)
    where = str(destination)
    if shard_tokens is not None:
        where = f"{done.files:,} files {destination.stem}-*.bin"
    say(f"{where}: {done.tokens:,} tokens of {done.num_bytes:,} bytes of {done.about}")
    for line in done.notes:
        say(line)


def data(
    step: Annotated[int, typer.Option(min=1, help="Step, starting at 1.")],
    run: Annotated[Path, typer.Option(metavar="DIR", help="Run directory.")] = Path("runs/latest"),
    rank: Annotated[
        int | None, typer.Option(min=0, help="Show the samples of this rank only, if known.")
    ] = None,
) -> None:
    """Show the training samples of one step."""
    from fsdpctl.commands.samples import samples_of_step

    found = samples_of_step(run, step)
    say(f"step {step}: {len(found.samples)} samples{found.about and '; '}{found.about}")
    for sample in found.samples:
        if rank is None or rank in sample.ranks:
            names = ", ".join(map(str, sample.ranks))
            whose = f" (rank{'s' * (len(sample.ranks) > 1)} {names})" if names else ""
            say(f"--- sample {sample.number}{whose}\n{sample.text}")
