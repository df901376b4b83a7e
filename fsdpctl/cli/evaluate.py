"""`fsdpctl evaluate`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fsdpctl.cli.console import CONVERSATIONS, count_of, emit, err, say
from fsdpctl.cli.words import Asked, Words, settled

Weights = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="A run, a checkpoint, or a Hugging Face directory."),
]


def evaluate(
    source: Weights,
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how well a model predicts text: loss, perplexity, bits per byte.

    A run or checkpoint on the data that it was trained on, unless data=… says another:
    `fsdpctl evaluate runs/latest data=text data.path=other.txt data.val_fraction=0`.
    """
    from fsdpctl.checkpoint.folders import find_checkpoint
    from fsdpctl.config.compose import compose_config
    from fsdpctl.config.hub_cache import cached_model
    from fsdpctl.config.model_path import is_hugging_face
    from fsdpctl.estimate.automatic import resolved_with_stand_ins
    from fsdpctl.tools.evaluate import evaluate_run, words_of

    source = cached_model(source)
    place = source if is_hugging_face(source) else find_checkpoint(source)
    typed = settled(Asked(words)).words or []
    named = {word.partition("=")[0] for word in typed}
    other_data = bool({"data", "data.path"} & named)
    known = [
        word
        for word in words_of(place)
        if word.partition("=")[0] not in named and not (other_data and word.startswith("data"))
    ]
    with count_of(CONVERSATIONS) as advance:
        run = resolved_with_stand_ins(compose_config([*known, *typed]), on_rows=advance)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        found = evaluate_run(
            run, lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        emit(json.dumps({"path": str(place), **found.to_dict()}, indent=2))
        return
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
    say(f"{place}: {run.data.description}")
    say(f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}{bits}")
    say(f"over {found.tokens:,} tokens in samples of {run.config.train.seq_len}")
