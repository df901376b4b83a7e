"""The model of a checkpoint or a Hugging Face directory: its loss on data, and text from it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.pretrained import attached_files, open_weights, read_assets, whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.comm.base import Collectives
from fsdpctl.config.auto import Selection
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model_path import is_hugging_face, model_words
from fsdpctl.config.schema import Config, PrefetchConfig
from fsdpctl.config.sealed import MANIFEST, read_sealed
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.batches import Batches
from fsdpctl.data.chats.formats import Message
from fsdpctl.data.chats.preview import prompt_tokens
from fsdpctl.data.tokenizer import BYTES, TOKENIZER_JSON, ByteTokenizer, FileTokenizer
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.plan.engines import has_strategy
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.run import Opened, settle
from fsdpctl.run.assets import ends_of
from fsdpctl.train.assemble import make_model
from fsdpctl.train.callbacks.sample import Sampling, generate
from fsdpctl.train.loss import validation_loss


class TextGenerator:
    """A model in memory that continues text."""

    def __init__(self, source: Path, count: int, sampling: Sampling) -> None:
        """Load the model, to generate at most `count` tokens.

        Raises:
            UsageError: If the tokenizer is unknown.
            FsdpctlError: If the model doesn't fit into memory.
            CheckpointError: If the checkpoint is corrupted.
        """
        config, weights, self.files = _opened(source)
        # Compiling takes longer than it saves on a few tokens.
        self.config = replace(config, train=replace(config.train, compile=False))
        self.source, self._count, self.sampling = source, count, sampling
        if TOKENIZER_JSON not in self.files:
            raise UsageError(f"{source}: contains no tokenizer, which is required to generate text")
        self.tokenizer = (
            ByteTokenizer()
            if config.data.tokenizer == BYTES
            else FileTokenizer(str(source), self.files)
        )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with self._in_memory():
            self._model = make_model(self.config, self._device, strategy="no_shard", empty=True)
            load_weights(weights, self._model)

    def tokens_after(self, prompt: list[int]) -> list[int]:
        """Generate the tokens after a prompt.

        Raises:
            FsdpctlError: If memory runs out.
        """
        with self._in_memory():
            return generate(
                self._model,
                prompt,
                range(self._count),
                context=self.config.train.seq_len,
                sampling=self.sampling,
                device=self._device,
            )

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # torch has no exception type for its CPU allocator.
            if not isinstance(error, torch.OutOfMemoryError) and "CPUAllocator" not in str(error):
                raise
            what = f"does not fit into memory on {self._device.type}"
            raise FsdpctlError(f"{self.source}: {what}") from None


def sample_text(source: Path, prompt: str, count: int, sampling: Sampling) -> str:
    """Return the prompt continued by at most `count` tokens of the model in `source`.

    Raises:
        UsageError: If the tokenizer is unknown, or if the prompt isn't UTF-8.
        FsdpctlError: If the model doesn't fit into memory.
        CheckpointError: If the checkpoint is corrupted.
    """
    _check_text(prompt)
    generator = TextGenerator(source, count, sampling)
    tokenizer = generator.tokenizer
    return prompt + tokenizer.decode(generator.tokens_after(tokenizer.encode_prompt(prompt)))


class ChatSession:
    """A conversation with a model, rendered by the model's chat template."""

    def __init__(self, source: Path, count: int, sampling: Sampling) -> None:
        """Load the model, as in `TextGenerator`.

        Raises:
            UsageError: Also if the model uses the byte tokenizer.
        """
        generator = TextGenerator(source, count, sampling)
        if not isinstance(generator.tokenizer, FileTokenizer):
            raise UsageError(f"{source}: --chat: requires a model with a tokenizer.json")
        self._generator, self._tokenizer = generator, generator.tokenizer
        ends = ends_of(generator.files, str(source))
        if generator.tokenizer.end is not None:
            ends = (*ends, generator.tokenizer.end)
        generator.sampling = replace(sampling, ends=ends)
        self._messages: list[Message] = []

    def answer(self, question: str) -> str:
        """Generate the assistant message that follows `question` and all earlier messages.

        Raises:
            UsageError: If there is no template, or if it rejects the conversation.
            FsdpctlError: If memory runs out.
        """
        _check_text(question)
        generator = self._generator
        self._messages.append({"role": "user", "content": question})
        today = generator.config.data.date or date.today().isoformat()
        prompt = prompt_tokens(generator.source, self._tokenizer, self._messages, today)
        text = self._tokenizer.decode(generator.tokens_after(prompt))
        self._messages.append({"role": "assistant", "content": text})
        return text


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: not UTF-8") from None


def _opened(source: Path) -> tuple[Config, Tensors, dict[str, bytes]]:
    """Open the model's configuration, its weights, and its other files."""
    if is_hugging_face(source):
        config = compose_config(["model=hf", f"model.path={source}"]).config
        return config, open_weights(config.model), read_assets(source)
    reader = CheckpointReader(source)
    config = config_of_checkpoint(reader.manifest.config, str(reader))
    return config, whole_weights(reader), attached_files(reader)


_OF_THE_DATA = ("data", "train.seq_len")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation."""

    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float | None  # None if the size of the text is unknown
    tokens: int  # number of predicted tokens


def words_of(source: Path) -> list[str]:
    """Return the settings of the model in a checkpoint or directory, with its training data."""
    model_words(str(source))  # raises an error if there is no model
    words = ["model=hf", f"model.path={source}", "launch.nproc_per_node=1"]
    if (source / MANIFEST).exists():
        known: dict[str, str] = read_sealed(source)["config"]
        words += [
            f"{name}={text}"
            for name, text in known.items()
            if name.startswith(_OF_THE_DATA) and name != "data.tokenizer"
        ]
    return words


def evaluate_run(opened: Opened, on_batch: Callable[[int, int], None]) -> Evaluation:
    """Compute the loss on the validation data, or on all data if nothing is held out.

    `on_batch` is called with the number of completed batches, and of all batches.

    Raises:
        CheckpointError: If the weights are corrupted.
    """
    # All strategies compute the same on one rank: `auto` selects none.
    engine = opened.config.engine.name
    strategy = next(name for name, row in STRATEGIES.items() if has_strategy(engine, row))
    settled = settle(opened.config, Selection(strategy, "none", PrefetchConfig(), None))
    config, data = settled.config, opened.data
    stream = data.val or data.train
    device = torch.device(str(config.launch.device))
    model = make_model(config, device, strategy="no_shard", empty=True)
    load_weights(open_weights(config.model), model)
    batches = Batches(stream.rows(config.train.seq_len), settled.batches, 0, data.vocab_size)
    total = batches.num_validation_batches(0)

    def tell(number: int) -> bool:
        on_batch(number, total)
        return True

    loss = validation_loss(
        model,
        batches,
        Collectives(),
        device,
        at_most=0,
        chunk_tokens=config.train.loss_chunk_tokens or 0,
        goes_on=tell,
    )
    assert loss is not None
    bits = None
    if stream.num_bytes:
        bits = loss / math.log(2) * stream.num_tokens / stream.num_bytes
    return Evaluation(loss, math.exp(min(loss, 700.0)), bits, batches.rows.num_targets)
