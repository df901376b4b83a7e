"""`fsdpctl sample` and `fsdpctl evaluate`."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.checkpoint.folders import find_checkpoint
from fsdpctl.commands.checkpoint import found_checkpoint
from fsdpctl.commands.config_args import ConfigArguments, Settings, normalized
from fsdpctl.commands.console import emit, note, out, say
from fsdpctl.config.compose import compose_config
from fsdpctl.config.hub_cache import cached_model
from fsdpctl.config.model_path import is_hugging_face
from fsdpctl.config.peft import notes_on_adapters
from fsdpctl.io.activity import DISPLAY
from fsdpctl.io.texts import printable

Weights = Annotated[
    Path, typer.Argument(metavar="SRC", help="A run, a checkpoint, or a Hugging Face directory.")
]


def sample(  # noqa: PLR0913  # each is an option
    source: Weights,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Format the prompt by the model's chat template.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**53, help="Seed of the random sampling.")] = 0,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Sampling temperature.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=1e-6, max=1.0, help="Total probability of the tokens to sample from."),
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Choose the likeliest token.")] = False,
) -> None:
    """Generate text from a checkpoint or a model.

    With --chat and without --prompt, each line of standard input is a user message.
    """
    from fsdpctl.commands.generation import ChatSession, sample_text
    from fsdpctl.train.callbacks.sample import Sampling

    sampling = Sampling(seed, 0.0 if greedy else temperature, top_p)
    source = cached_model(source)
    place = source if is_hugging_face(source) else found_checkpoint(source)
    _note_adapters(source)
    if not chat:
        _show(sample_text(place, prompt, tokens, sampling))
        return
    talk = ChatSession(place, tokens, sampling)
    for message in [prompt] if prompt else _user_messages():
        _show(talk.answer(message))


def _show(pieces: Iterable[str]) -> None:
    """Print text as it is generated: verbatim, but without control characters in a terminal."""
    for piece in pieces:
        emit(printable(piece) if out.is_terminal else piece, end="")
    emit("")


def _note_adapters(source: Path) -> None:
    for line in notes_on_adapters(str(source), None):
        note(line)


def _user_messages() -> Iterator[str]:
    shown = "> " if sys.stdin.isatty() else ""
    DISPLAY.started()  # now, the user types
    with suppress(EOFError):
        while True:
            if message := input(shown).strip():
                yield message


def evaluate(
    source: Weights,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute loss, perplexity and bits per byte.

    A run or checkpoint is evaluated on its own data, unless data=… is set:
    `fsdpctl evaluate runs/latest data=text data.path=other.txt data.val_fraction=0`.
    """
    from fsdpctl.commands.evaluate import evaluate_run, words_of
    from fsdpctl.resolve.run import open_run

    source = cached_model(source)
    place = source if is_hugging_face(source) else find_checkpoint(source)
    _note_adapters(source)
    given = normalized(ConfigArguments(settings)).settings or []
    named = {text.partition("=")[0] for text in given}
    other_data = bool({"data", "data.path"} & named)
    known = [
        text
        for text in words_of(place)
        if text.partition("=")[0] not in named and not (other_data and text.startswith("data"))
    ]
    opened = open_run(compose_config([*known, *given]))
    found = evaluate_run(opened)
    is_seen = not other_data and not is_hugging_face(source)  # the run's own data
    part = "validation" if opened.data.val else "training" if is_seen else "all"
    if as_json:
        emit(json.dumps({"path": str(place), "part": part, **asdict(found)}, indent=2))
        return
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.3f} bits per byte"
    seen = {"training": ", training data (no validation data)", "all": ", all data"}.get(part, "")
    say(f"{place}: {opened.data.description}{seen}")
    for line in opened.data.about_files:
        say(line)
    say(f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}{bits}")
    for name, loss in found.loss_by_source.items():
        say(f"{name}: loss {loss:.4f}")
    say(f"over {found.tokens:,} tokens in samples of {opened.config.train.seq_len}")
