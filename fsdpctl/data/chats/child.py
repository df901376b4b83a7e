"""The process that runs a template, which somebody else may have written: `python -m` this.

It reads a `Setup` and then lists of chats from standard input, and answers each on standard output,
in order: MessagePack behind its length in four bytes. It opens nothing, its memory and the time
that it computes for one row are limited, and it ends when its input does.
"""

import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO

import msgspec

from fsdpctl.data.chats.render import Renderer, RenderError
from fsdpctl.data.chats.rows import Chat
from fsdpctl.data.chats.samples import Made, Sample, Wanted, samples_of
from fsdpctl.data.chats.turns import TurnError

LENGTH_BYTES = 4
_MANY = 100  # messages


class Setup(msgspec.Struct, array_like=True):
    """What all rows have in common."""

    template: str
    tool_template: str  # for conversations with tools; the same where there is no other
    special_tokens: dict[str, str]
    controls: str  # a pattern; empty: none
    date: str
    train_on: str
    rewritten_turns: str
    most_seconds: float  # of computing, for a chat of a few messages
    most_bytes: int  # of memory


class Answer(msgspec.Struct, array_like=True):
    """What became of a row, or of the setup."""

    made: Made | None
    error: str = ""


class _OutOfTimeError(BaseException):
    """Not an Exception, so that nothing on the way takes it for one of the template's."""


def send(stream: IO[bytes], value: object) -> None:
    """Write one message."""
    content = msgspec.msgpack.encode(value)
    stream.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read one message; None at the end."""
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "little")) if len(length) == LENGTH_BYTES else None


def main() -> None:
    """Answer until the input ends."""
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    first = receive(given)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    _limit(setup)
    prepared: list[Callable[[Chat], Made]] = []
    send(taken, [_within(setup, setup.most_seconds, lambda: prepared.append(_worker(setup)))])
    while prepared and (content := receive(given)) is not None:
        send(taken, list(_answers(setup, prepared[0], content)))


def _answers(setup: Setup, work: Callable[[Chat], Made], content: bytes) -> Iterator[Answer]:
    """An answer for each chat, up to the first that is refused."""
    for chat in msgspec.msgpack.decode(content, type=list[Chat]):
        answer = _within(setup, seconds_for(setup, chat), partial(work, chat))
        yield answer
        if answer.error:
            return


def seconds_for(setup: Setup, chat: Chat) -> float:
    """How long the chat may compute: each answer takes some renderings of all before it."""
    return setup.most_seconds * (1 + len(chat.messages) // _MANY)


def _worker(setup: Setup) -> Callable[[Chat], Made]:
    plain = Renderer(setup.template, setup.special_tokens, setup.date)
    with_tools = plain
    if setup.tool_template != setup.template:
        with_tools = Renderer(setup.tool_template, setup.special_tokens, setup.date)
    controls = re.compile(setup.controls) if setup.controls else None
    wanted = Wanted(setup.train_on, setup.rewritten_turns)

    def work(chat: Chat) -> Made:
        renderer = with_tools if chat.tools else plain
        if chat.is_question:
            asked = renderer.render(
                chat.messages, tools=chat.tools, options=chat.options, prompted=True
            )
            return Made([Sample(asked.text, [])], {})
        return samples_of(renderer, chat, wanted, controls)

    return work


def _within(setup: Setup, seconds: float, work: Callable[[], Made | None]) -> Answer:
    """What `work` gives in so many seconds of computing, or why it gave nothing."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            return Answer(work())
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTimeError:
        return Answer(None, f"the template computes for longer than {seconds:g} s")
    except MemoryError:
        return Answer(None, _too_large(setup))
    except (RenderError, TurnError) as error:
        said = str(error)
        return Answer(None, _too_large(setup) if said.startswith("MemoryError") else said)


def _too_large(setup: Setup) -> str:
    return f"the template takes more than {setup.most_bytes >> 20} MiB of memory"


def _limit(setup: Setup) -> None:
    """Bound what the process may take; ITIMER_VIRTUAL is its own time, however busy the machine."""

    def stop(number: int, frame: object) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGVTALRM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it is told, and ends it
    try:
        resource.setrlimit(resource.RLIMIT_AS, (setup.most_bytes, setup.most_bytes))
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError):
        pass  # a system without such limits still has the one of time


if __name__ == "__main__":
    main()
