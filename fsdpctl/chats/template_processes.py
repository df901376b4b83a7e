"""Processes that run chat templates, which are untrusted programs.

A process reads a batch of chats in MessagePack from one file, and writes a line of JSON per chat to
another file. The kernel limits the memory, CPU time and output of the process.

Note: `concurrent.futures.ProcessPoolExecutor` would unpickle results, so a template that escapes
its sandbox could run code in the process that trains.
"""

import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import msgspec

import fsdpctl
from fsdpctl.chats.conversation import RenderedChat
from fsdpctl.chats.formats import Chat
from fsdpctl.chats.render import Renderer, RenderError
from fsdpctl.chats.samples import ChatSample, ChatSamples, LossPolicy, samples_of
from fsdpctl.chats.turns import TurnError
from fsdpctl.chats.values import from_extension
from fsdpctl.errors import UsageError
from fsdpctl.io.resources import num_cores
from fsdpctl.io.texts import MIB, batch_by_size

MAX_SECONDS_PER_CHAT, MAX_BYTES_PER_CHAT = 10.0, 2 << 30  # most chats need less than 1%
_BATCH_BYTES = 2 * MIB  # rendering takes much longer than starting a process
_MESSAGES_PER_BUDGET = 100


class TemplateSetup(msgspec.Struct, array_like=True):
    """Everything that the chats of a data set have in common."""

    template: str
    tool_template: str  # for conversations with tools; usually the same
    special_tokens: dict[str, str]
    control_pattern: str  # a pattern; empty: no control tokens
    date: str
    train_on: str
    rewritten_turns: str
    max_seconds: float  # CPU time for a chat of up to 100 messages
    max_bytes: int  # a limit for memory, and for output

    def seconds_for(self, chat: Chat) -> float:
        """Return the CPU seconds for a chat, which is rendered a few times per message."""
        return self.max_seconds * (1 + len(chat.messages) // _MESSAGES_PER_BUDGET)


# The first reply is about the template: an error, or "" if it can be compiled. Then follows a reply
# about each chat, up to the first error.
_REPLY_DECODER = msgspec.json.Decoder(ChatSamples | str)


def render_chats(
    setup: TemplateSetup, location: str, chats: Iterable[tuple[Chat, str]]
) -> Iterator[ChatSamples]:
    """Yield the samples of each chat, which comes with its location; `location` is the template's.

    UsageError if the template can't be compiled, rejects a chat or exceeds a limit. The message
    begins with a location.
    """
    encode, seconds_for = msgspec.msgpack.encode, setup.seconds_for
    encoded = ((encode(chat), its_location, seconds_for(chat)) for chat, its_location in chats)
    running = deque[_Batch]()

    def results(max_running: int) -> Iterator[ChatSamples]:
        while len(running) > max_running:
            yield from running[0].result()
            running.popleft().close()

    try:
        for batch in batch_by_size(encoded, lambda chat: len(chat[0]), _BATCH_BYTES):
            yield from results(min(8, num_cores()) - 1)
            with TemporaryFile() as input_file:
                content = [msgspec.Raw(encoded_chat) for encoded_chat, *_ in batch]
                input_file.write(msgspec.msgpack.encode((setup, content)))
                input_file.seek(0)
                output_file = TemporaryFile()  # noqa: SIM115  # closed with the batch
                limits = [(location, setup.max_seconds), *(each[1:] for each in batch)]
                running.append(_Batch(_start(input_file, output_file), output_file, limits))
        yield from results(0)
    finally:
        for each in running:
            each.close()


@dataclass(frozen=True, slots=True)
class _Batch:
    """A process, its output, and the locations and CPU seconds of the template and each chat."""

    process: subprocess.Popen[bytes]
    replies_file: IO[bytes]
    limits: list[tuple[str, float]]

    def result(self) -> list[ChatSamples]:
        """Wait for the samples of the chats. UsageError as in `render_chats`."""
        code, replies = self.process.wait(), list[ChatSamples | str]()
        self.replies_file.seek(0)
        content = self.replies_file.read()
        with suppress(msgspec.MsgspecError):
            replies = _REPLY_DECODER.decode_lines(content[: content.rfind(b"\n") + 1])
        for reply, (location, _) in zip(replies, self.limits, strict=False):
            if isinstance(reply, str) and reply:
                raise UsageError(f"{location}: {reply}")
        if len(replies) < len(self.limits):
            location, seconds = self.limits[len(replies)]
            problem = "ended its process"
            if code == -signal.SIGXCPU:
                problem = f"computes for longer than {seconds:g} s"
            raise UsageError(f"{location}: the template {problem}")
        return [each for each in replies if not isinstance(each, str)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.replies_file.close()


def _start(input_file: IO[bytes], output_file: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that imports this package, but nothing from the working directory."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fsdpctl.chats.template_processes"],
        stdin=input_file,
        stdout=output_file,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(fsdpctl.__file__).parent.parent)},
    )


def main(input_file: IO[bytes], output_file: IO[bytes]) -> None:
    """Write a line about the template and about each chat, up to the first error."""
    kinds = tuple[TemplateSetup, list[Chat]]
    setup, chats = msgspec.msgpack.decode(input_file.read(), type=kinds, ext_hook=from_extension)
    _limit(resource.RLIMIT_AS, setup.max_bytes)
    _limit(resource.RLIMIT_FSIZE, setup.max_bytes)
    _limit(resource.RLIMIT_NOFILE, 16)
    _limit(resource.RLIMIT_CORE, 0)
    for reply in _replies(setup, chats):
        output_file.write(msgspec.json.encode(reply) + b"\n")
        output_file.flush()  # the kernel may kill the process while it renders the next chat


def _replies(setup: TemplateSetup, chats: list[Chat]) -> Iterator[ChatSamples | str]:
    try:
        _limit(resource.RLIMIT_CPU, time.process_time() + setup.max_seconds)
        render = _make_renderer(setup)
        yield ""
        for chat in chats:
            _limit(resource.RLIMIT_CPU, time.process_time() + setup.seconds_for(chat))
            yield render(chat)
    except (RenderError, TurnError, MemoryError) as error:
        problem = str(error)
        if isinstance(error, MemoryError) or problem.startswith("MemoryError"):
            problem = f"the template needs more than {setup.max_bytes >> 20} MiB of memory"
        yield problem


def _make_renderer(setup: TemplateSetup) -> Callable[[Chat], ChatSamples]:
    make = cache(lambda source: Renderer(source, setup.special_tokens, setup.date))
    without_tools, with_tools = make(setup.template), make(setup.tool_template)
    control_pattern = re.compile(setup.control_pattern) if setup.control_pattern else None
    policy = LossPolicy(setup.train_on, setup.rewritten_turns)

    def render(chat: Chat) -> ChatSamples:
        renderer = with_tools if chat.tools else without_tools
        if chat.add_generation_prompt:
            prompt = RenderedChat(renderer, chat, None).prompt_for(len(chat.messages))
            return ChatSamples([ChatSample(prompt.text, [])], {})
        return samples_of(renderer, chat, policy, control_pattern)

    return render


def _limit(resource_type: int, maximum: float) -> None:
    """Lower a resource limit of this process."""
    with suppress(OSError, ValueError):  # the system lacks this limit, or has a lower one
        hard_limit = resource.getrlimit(resource_type)[1]
        resource.setrlimit(resource_type, (math.ceil(maximum), hard_limit))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
