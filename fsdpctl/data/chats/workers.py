"""Processes that run chat templates, which are untrusted programs.

A template runs in a child process that opens nothing, with limits on its memory and computing time.
The child runs `python -m` this module. It reads a `TemplateSetup` and then lists of chats, and
replies to each in order, in MessagePack.

Note: `concurrent.futures.ProcessPoolExecutor` with such limits would be shorter, but it unpickles
results. A template that escapes its sandbox could then run code in the process that trains. Here it
can only send data of the expected types. An executor can't end a worker that hangs, either.
"""

import os
import re
import resource
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from threading import Event, Timer

import msgspec

import fsdpctl
from fsdpctl.data.chats.formats import Chat
from fsdpctl.data.chats.render import Renderer, RenderError
from fsdpctl.data.chats.samples import ChatSample, ChatSamples, LossPolicy, samples_of
from fsdpctl.data.chats.turns import TurnError
from fsdpctl.data.chats.values import from_extension
from fsdpctl.errors import UsageError

MOST_SECONDS, MOST_BYTES = 10.0, 2 << 30  # per chat; most need less than a hundredth
_PATIENCE = 20  # wall-clock time, in multiples of computing time, before a process is killed
_MOST_REPLY = 1 << 30  # bytes
_BATCH = 32  # chats
_BYTES_PER_PROCESS = 1 << 19  # input that takes about as long as starting a process
_MANY = 100  # messages


class TemplateSetup(msgspec.Struct, array_like=True):
    """Everything that the chats of a data set have in common."""

    template: str
    tool_template: str  # for conversations with tools; usually the same
    special_tokens: dict[str, str]
    controls: str  # a pattern; empty: no control tokens
    date: str
    train_on: str
    rewritten_turns: str
    most_seconds: float  # of computing, for a chat of a few messages
    most_bytes: int  # of memory

    def seconds_for(self, chat: Chat) -> float:
        """Return the computing time for a chat: each message needs some renderings of all."""
        return self.most_seconds * (1 + len(chat.messages) // _MANY)


class Reply(msgspec.Struct, array_like=True):
    """The samples of a chat, or the reason why there are none."""

    made: ChatSamples | None
    error: str = ""


class _Worker:
    """A child process, with the locations of the chats that it works on."""

    def __init__(self) -> None:
        self.process, self._connection = _start()
        self._places: list[str] = []
        self._seconds = 0.0

    def send(self, message: object, places: list[str], seconds: float) -> None:
        self._places, self._seconds = places, seconds
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            raise UsageError(f"{self._where}: the template ended its process") from None

    def receive(self) -> list[Reply]:
        """Wait for the replies to the last message, in order, up to the first error.

        Raises:
            UsageError: If a chat is rejected, or if the process exits or hangs.
        """
        late = Event()

        def give_up() -> None:
            late.set()
            self.process.kill()

        patience = Timer(self._seconds * _PATIENCE, give_up)
        patience.daemon = True
        patience.start()
        try:
            content = self._connection.recv_bytes(_MOST_REPLY)
            replies = msgspec.msgpack.decode(content, type=list[Reply])
        except (EOFError, OSError, msgspec.MsgspecError):
            reason = "does not finish" if late.is_set() else "ended its process; out of memory?"
            raise UsageError(f"{self._where}: the template {reason}") from None
        finally:
            patience.cancel()
        for reply, place in zip(replies, self._places, strict=False):
            if reply.error:
                raise UsageError(f"{place}: {reply.error}")
        return replies

    @property
    def _where(self) -> str:
        first, last = self._places[0], self._places[-1]
        return first if first == last else f"{first} (to {last})"

    def close(self) -> None:
        self.process.kill()
        with suppress(OSError):
            self._connection.close()
        self.process.wait()


class Workers:
    """Processes that all run the same template."""

    def __init__(self, setup: TemplateSetup, where: str, count: int) -> None:
        """Start `count` processes.

        Args:
            setup: The template and its limits.
            where: The location of the template, for messages.
            count: The number of processes.

        Raises:
            UsageError: If the template can't be compiled.
        """
        self._setup = setup
        self._workers = [_Worker() for _ in range(count)]
        try:
            for worker in self._workers:
                worker.send(setup, [where], setup.most_seconds)
            for worker in self._workers:
                worker.receive()
        except BaseException:
            self.close()
            raise

    def results(self, chats: Iterable[tuple[Chat, str]]) -> Iterator[ChatSamples]:
        """Yield the samples of each chat, in order. The texts are the chats' locations.

        Raises:
            UsageError: If the template rejects a chat. The message begins with its location.
        """
        # A process has one batch at a time, so that it never writes while the parent writes to it.
        source = iter(chats)
        waiting: deque[_Worker] = deque()
        idle = deque(self._workers)
        while batch := list(islice(source, _BATCH)):
            if not idle:
                idle.append(waiting.popleft())
                yield from _made(idle[0])
            worker = idle.popleft()
            seconds = sum(self._setup.seconds_for(chat) for chat, _ in batch)
            worker.send([chat for chat, _ in batch], [place for _, place in batch], seconds)
            waiting.append(worker)
        while waiting:
            yield from _made(waiting.popleft())

    def close(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            worker.close()


def _made(worker: _Worker) -> Iterator[ChatSamples]:
    return (each.made for each in worker.receive() if each.made is not None)


@contextmanager
def workers(setup: TemplateSetup, where: str, num_bytes: int) -> Iterator[Workers]:
    """Run as many processes as input of `num_bytes` can use on this machine."""
    useful = 1 + num_bytes // _BYTES_PER_PROCESS
    found = Workers(setup, where, max(1, min(8, os.cpu_count() or 1, useful)))
    try:
        yield found
    finally:
        found.close()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a child that imports this package, and nothing from the current directory."""
    root = str(Path(fsdpctl.__file__).parent.parent)
    ours, theirs = socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fsdpctl.data.chats.workers", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": root},
        )
    return process, Connection(ours.detach())


class _OutOfTimeError(BaseException):
    """The time is up. Not an Exception, so that a template's handlers don't catch it."""


def main() -> None:
    """Reply to messages until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):
        setup = msgspec.msgpack.decode(connection.recv_bytes(), type=TemplateSetup)
        _limit(setup)
        prepared: list[Callable[[Chat], ChatSamples]] = []
        ready = _within(setup, setup.most_seconds, lambda: prepared.append(prepare(setup)))
        connection.send_bytes(msgspec.msgpack.encode([ready]))
        while prepared:
            received = connection.recv_bytes()
            chats = msgspec.msgpack.decode(received, type=list[Chat], ext_hook=from_extension)
            replies = list(_replies(setup, prepared[0], chats))
            connection.send_bytes(msgspec.msgpack.encode(replies))


def _replies(
    setup: TemplateSetup, work: Callable[[Chat], ChatSamples], chats: list[Chat]
) -> Iterator[Reply]:
    """Yield a reply for each chat, up to the first error."""
    for chat in chats:
        reply = _within(setup, setup.seconds_for(chat), partial(work, chat))
        yield reply
        if reply.error:
            return


def prepare(setup: TemplateSetup) -> Callable[[Chat], ChatSamples]:
    """Compile the template, and return the function that renders a chat with it."""
    plain = Renderer(setup.template, setup.special_tokens, setup.date)
    with_tools = plain
    if setup.tool_template != setup.template:
        with_tools = Renderer(setup.tool_template, setup.special_tokens, setup.date)
    controls = re.compile(setup.controls) if setup.controls else None
    policy = LossPolicy(setup.train_on, setup.rewritten_turns)

    def work(chat: Chat) -> ChatSamples:
        renderer = with_tools if chat.tools else plain
        if chat.is_question:
            prompt = renderer.render(
                chat.messages, tools=chat.tools, options=chat.options, prompted=True
            )
            return ChatSamples([ChatSample(prompt.text, [])], {})
        return samples_of(renderer, chat, policy, controls)

    return work


def _within(setup: TemplateSetup, seconds: float, work: Callable[[], ChatSamples | None]) -> Reply:
    """Run `work` for at most `seconds` of computing."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            return Reply(work())
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTimeError:
        return Reply(None, f"the template computes for longer than {seconds:g} s")
    except MemoryError:
        pass
    except (RenderError, TurnError) as error:
        if not str(error).startswith("MemoryError"):
            return Reply(None, str(error))
    return Reply(None, f"the template needs more than {setup.most_bytes >> 20} MiB of memory")


def _limit(setup: TemplateSetup) -> None:
    """Limit this process. ITIMER_VIRTUAL counts its own time, however busy the machine is."""

    def stop(number: int, frame: object) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGVTALRM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and kills the child
    with suppress(OSError, ValueError):  # a system without these limits has the one on time
        resource.setrlimit(resource.RLIMIT_AS, (setup.most_bytes, setup.most_bytes))
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
