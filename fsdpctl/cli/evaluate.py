"""`fsdpctl evaluate`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fsdpctl.cli.config_args import ConfigArguments, Settings, normalized
from fsdpctl.cli.console import CONVERSATIONS, count_of, emit, err, say

Weights = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="A run, a checkpoint, or a Hugging Face directory."),
]


def evaluate(
    source: Weights,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute loss, perplexity and bits per byte.

    A run or checkpoint is evaluated on its own data, unless data=… is set:
    `fsdpctl evaluate runs/latest data=text data.path=other.txt data.val_fraction=0`.
    """
    from fsdpctl.checkpoint.folders import find_checkpoint
    from fsdpctl.config.compose import compose_config
    from fsdpctl.config.hub_cache import cached_model
    from fsdpctl.config.model_path import is_hugging_face
    from fsdpctl.resolve.run import open_run
    from fsdpctl.tools.evaluate import evaluate_run, words_of

    source = cached_model(source)
    place = source if is_hugging_face(source) else find_checkpoint(source)
    given = normalized(ConfigArguments(settings)).settings or []
    named = {text.partition("=")[0] for text in given}
    other_data = bool({"data", "data.path"} & named)
    known = [
        text
        for text in words_of(place)
        if text.partition("=")[0] not in named and not (other_data and text.startswith("data"))
    ]
    with count_of(CONVERSATIONS) as advance:
        opened = open_run(compose_config([*known, *given]), on_rows=advance)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        found = evaluate_run(
            opened, lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        emit(json.dumps({"path": str(place), **found.to_dict()}, indent=2))
        return
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
    say(f"{place}: {opened.data.description}")
    say(f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}{bits}")
    say(f"over {found.tokens:,} tokens in samples of {opened.config.train.seq_len}")
