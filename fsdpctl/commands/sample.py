"""`fsdpctl sample` generates text from a checkpoint, Hugging Face directory or GGUF file."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer

from fsdpctl.chats.values import Message
from fsdpctl.checkpoint.initial_weights import open_with_base
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.pretrained import open_weights, read_assets_in, read_attachments
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.tensor_source import TensorSource
from fsdpctl.comm.collectives import Collectives
from fsdpctl.commands.chat_preview import prompt_tokens
from fsdpctl.commands.checkpoint import resolve_checkpoint
from fsdpctl.commands.printing import emit, note, out
from fsdpctl.config.compose import compose_config
from fsdpctl.config.gguf_model import notes_on_gguf
from fsdpctl.config.hub import model_directory
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.config.peft import notes_on_adapters
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.config.training import default_seq_len
from fsdpctl.data.tokenizer import BYTE_TOKENIZER, ByteTokenizer, FileTokenizer, Tokenizer
from fsdpctl.data.tokenizer_files import VOCABULARIES
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io.activity import DISPLAY, doing
from fsdpctl.io.texts import printable
from fsdpctl.models.decoder_check import attention_for
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.run.assets import end_tokens
from fsdpctl.training.assemble import make_model, single_rank_strategy
from fsdpctl.training.callbacks.generation import Sampling, generate

ModelArg = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="A run, checkpoint, Hugging Face directory or GGUF file."),
]


def sample(  # noqa: PLR0913  # each is an option
    source: ModelArg,
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
    greedy: Annotated[bool, typer.Option("--greedy", help="Choose the most likely token.")] = False,
) -> None:
    """Generate text from a checkpoint or a model.

    With --chat and without --prompt, each line of standard input is a user message.
    """
    sampling = Sampling(seed, 0.0 if greedy else temperature, top_p)
    source = model_directory(source)
    folder = source if is_foreign_model(source) else resolve_checkpoint(source)
    note_ignored_parts(source)
    if chat:
        _chat(folder, [prompt] if prompt else _user_messages(), tokens, sampling)
    else:
        _print_pieces(sample_text(folder, prompt, tokens, sampling))


def _print_pieces(pieces: Iterable[str]) -> str:
    """Print text as it arrives, and return it. A terminal receives no control characters."""
    shown = []
    for piece in pieces:
        emit(printable(piece) if out.is_terminal else piece, end="")
        shown.append(piece)
    emit("")
    return "".join(shown)


def note_ignored_parts(source: Path) -> None:
    """Print which parts of a model are ignored: adapters next to it, or scaling in a GGUF file."""
    note(*notes_on_adapters(str(source), None), *notes_on_gguf(str(source)))


def _user_messages() -> Iterator[str]:
    marker = "> " if sys.stdin.isatty() else ""
    DISPLAY.end_startup()  # the command waits for the user
    with suppress(EOFError):
        while True:
            if message := input(marker).strip():
                yield message


class TextGenerator:
    """A model in memory that continues text."""

    def __init__(self, source: Path, count: int, sampling: Sampling) -> None:
        """Load the model, to generate at most `count` tokens."""
        config, weights, files = _open_model(source)
        # For a few tokens, compiling takes longer than it saves.
        changes = {"train.compile": False, "model.attention": attention_for(config.model)}
        self.config = stored_config(config.changed(changes))
        self.source, self._count = source, count
        model, longest = config.model, default_seq_len(config.model.name, config.model.max_seq_len)
        self._context = config.train.seq_len or longest
        if model.is_pretrained:  # pretraining had longer texts than fine-tuning
            self._context = max(self._context, longest)
        if not files.keys() & set(VOCABULARIES):
            raise UsageError(f"{source}: contains no tokenizer, which is required to generate text")
        self.tokenizer: Tokenizer = ByteTokenizer()
        if config.data.tokenizer != BYTE_TOKENIZER:
            self.tokenizer = FileTokenizer(str(source), files)
        self._sampling, self.end_tokens = sampling, end_tokens(files, str(source))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with doing(f"loading {source}"), self._out_of_memory_as_error():
            strategy = single_rank_strategy(self.config)
            self._model = make_model(self.config, self._device, strategy=strategy, empty=True)
            load_weights(weights, self._model)

    def text_after(self, prompt: list[int], before: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text after a prompt in pieces, without the token that ends generation.

        Whether the text begins with a space depends on the tokens `before`; an answer has none.
        """
        with self._out_of_memory_as_error(), doing("generating"):
            tokens = generate(
                self._model,
                prompt,
                range(self._count),
                context=self._context,
                sampling=replace(self._sampling, end_tokens=self.end_tokens),
                device=self._device,
            )
            text_tokens = (x for x in tokens if x not in self.end_tokens)
            yield from self.tokenizer.decode_stream(text_tokens, before)

    @contextmanager
    def _out_of_memory_as_error(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # torch has no exception type for its CPU allocator.
            if not isinstance(error, torch.OutOfMemoryError) and "CPUAllocator" not in str(error):
                raise
            problem = f"does not fit into memory on {self._device.type}"
            raise FsdpctlError(f"{self.source}: {problem}") from None


def sample_text(source: Path, prompt: str, count: int, sampling: Sampling) -> Iterator[str]:
    """Yield the prompt continued by at most `count` tokens of the model in `source`, in pieces."""
    _check_text(prompt)
    generator = TextGenerator(source, count, sampling)
    tokens = generator.tokenizer.encode_prompt(prompt)
    yield prompt
    yield from generator.text_after(tokens, tokens)  # continues the line of the prompt


def _chat(source: Path, questions: Iterable[str], count: int, sampling: Sampling) -> None:
    generator = TextGenerator(source, count, sampling)
    tokenizer, messages = generator.tokenizer, list[Message]()
    if not isinstance(tokenizer, FileTokenizer):
        raise UsageError(f"{source}: --chat: requires a model with its own tokenizer")
    if tokenizer.eos_id is not None:
        generator.end_tokens = (*generator.end_tokens, tokenizer.eos_id)
    for question in questions:
        _check_text(question)
        messages.append({"role": "user", "content": question})
        today = generator.config.data.date or date.today().isoformat()
        answer = _print_pieces(generator.text_after(prompt_tokens(tokenizer, messages, today)))
        messages.append({"role": "assistant", "content": answer})


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: not UTF-8") from None


def _open_model(source: Path) -> tuple[Config, TensorSource, dict[str, bytes]]:
    if is_foreign_model(source):
        config = compose_config(["model=hf", f"model.path={source}"]).config
        return config, open_weights(config.model), read_assets_in(source)
    reader = CheckpointReader(source)
    config = config_of_checkpoint(reader.manifest.config, str(reader))
    return config, open_with_base(reader, Collectives())[0], read_attachments(reader)
