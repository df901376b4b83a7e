"""Text from a saved checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.pretrained import attached_files, open_weights, read_assets, whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model_path import is_hugging_face
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.chats.formats import Message
from fsdpctl.data.chats.preview import prompt_tokens
from fsdpctl.data.tokenizer import BYTES, TOKENIZER_JSON, ByteTokenizer, FileTokenizer
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.run.assets import ends_of
from fsdpctl.train.assemble import make_model
from fsdpctl.train.generate import Sampling, generate


class Speaker:
    """A model in memory that continues text."""

    def __init__(self, source: Path, count: int, sampling: Sampling) -> None:
        """Of a checkpoint or a Hugging Face directory; says `count` tokens at most.

        Raises:
            UsageError: the run's tokenizer is not known.
            FsdpctlError: the model does not fit into memory.
            CheckpointError: the checkpoint is damaged.
        """
        config, weights, self.files = _opened(source)
        # What a few tokens gain by compiled blocks is less than compiling takes.
        self.config = replace(config, train=replace(config.train, compile=False))
        self.source, self._count, self.sampling = source, count, sampling
        if TOKENIZER_JSON not in self.files:
            raise UsageError(f"{source}: nobody knows what tokenizer made the run's tokens")
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
        """What follows.

        Raises:
            FsdpctlError: there is no memory for it.
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
            # Of the CPU's allocator torch has no error of its own.
            if not isinstance(error, torch.OutOfMemoryError) and "CPUAllocator" not in str(error):
                raise
            what = f"does not fit into memory on {self._device.type}"
            raise FsdpctlError(f"{self.source}: {what}") from None


def sample_text(source: Path, prompt: str, count: int, sampling: Sampling) -> str:
    """The prompt and `count` further tokens, from the model in `source`, a checkpoint
    or a Hugging Face directory.

    Raises:
        UsageError: the run's tokenizer is not known, or the prompt is no text.
        FsdpctlError: the model does not fit into memory.
        CheckpointError: the checkpoint is damaged.
    """
    _check_text(prompt)
    speaker = Speaker(source, count, sampling)
    tokenizer = speaker.tokenizer
    return prompt + tokenizer.decode(speaker.tokens_after(tokenizer.encode_prompt(prompt)))


class Talk:
    """A conversation with a model, by its own chat template."""

    def __init__(self, source: Path, count: int, sampling: Sampling) -> None:
        """As `Speaker`; an answer has `count` tokens at most.

        Raises:
            UsageError: also, the model has no tokenizer of its own.
        """
        speaker = Speaker(source, count, sampling)
        if not isinstance(speaker.tokenizer, FileTokenizer):
            raise UsageError(f"{source}: --chat: a model of bytes has no chat template")
        self._speaker, self._tokenizer = speaker, speaker.tokenizer
        ends = ends_of(speaker.files, str(source))
        if speaker.tokenizer.end is not None:
            ends = (*ends, speaker.tokenizer.end)
        speaker.sampling = replace(sampling, ends=ends)
        self._messages: list[Message] = []

    def answer(self, asked: str) -> str:
        """What the model answers, with all that was said before in mind.

        Raises:
            UsageError: there is no template, or it refuses the conversation.
            FsdpctlError: there is no memory for it.
        """
        _check_text(asked)
        speaker = self._speaker
        self._messages.append({"role": "user", "content": asked})
        today = speaker.config.data.date or date.today().isoformat()
        prompt = prompt_tokens(speaker.source, self._tokenizer, self._messages, today)
        text = self._tokenizer.decode(speaker.tokens_after(prompt))
        self._messages.append({"role": "assistant", "content": text})
        return text


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: not UTF-8") from None


def _opened(source: Path) -> tuple[Config, Tensors, dict[str, bytes]]:
    """The model's configuration, its weights, and the files beside them."""
    if is_hugging_face(source):
        config = compose_config(["model=hf", f"model.path={source}"]).config
        return config, open_weights(config.model), read_assets(source)
    reader = CheckpointReader(source)
    config = config_of_checkpoint(reader.manifest.config, str(reader))
    return config, whole_weights(reader), attached_files(reader)
