"""The processes that templates run in, also if they don't reply."""

import os
import signal
from multiprocessing import Pipe

import pytest

from fsdpctl.data.chats import workers as running
from fsdpctl.data.chats.formats import Chat
from fsdpctl.data.chats.workers import TemplateSetup
from fsdpctl.errors import UsageError
from tests.data.chats.families import say, template_of
from tests.data.chats.opened import DATE

pytestmark = pytest.mark.usefixtures("template_processes_of_a_run")
CHAT = Chat(say("a", "b"), [True, True])
PLACES = [(CHAT, f"chats.jsonl, line {number}") for number in range(1, 71)]


def setup(template=template_of("chatml"), most_bytes=2 << 30):
    controls = r"<\|im_start\|>|<\|im_end\|>"
    return TemplateSetup(
        template, template, {}, controls, DATE, "assistant", "split", 10.0, most_bytes
    )


def test_replies_of_several_processes_are_in_order():
    with running.workers(setup(), "t", 1 << 30) as found:
        chats = [
            (Chat(say("a", str(number)), [True, True]), f"line {number}") for number in range(150)
        ]
        texts = [made.samples[0].text for made in found.results(chats)]
    assert texts == [
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{number}<|im_end|>\n"
        for number in range(150)
    ]


def test_the_error_names_the_lines_of_a_process_that_exits():
    with running.workers(setup(), "t", 0) as found:
        results = found.results(PLACES)
        next(results)
        found._workers[0].process.kill()
        with pytest.raises(
            UsageError, match="line 33 .to chats.jsonl, line 64.: the template ended its process"
        ):
            list(results)


def test_a_process_that_hangs_is_killed(monkeypatch):
    with running.workers(setup(), "t", 0) as found:
        monkeypatch.setattr(running, "_PATIENCE", 0.001)
        os.kill(found._workers[0].process.pid, signal.SIGSTOP)
        with pytest.raises(UsageError, match="line 32.: the template does not finish$"):
            next(found.results(PLACES))


def test_a_reply_of_another_type_is_an_error(monkeypatch):
    ours, theirs = Pipe()
    theirs.send({"anything": "pickled"})
    with running.workers(setup(), "t", 0) as found:
        monkeypatch.setattr(found._workers[0], "_connection", ours)
        with pytest.raises(UsageError, match="the template ended its process"):
            next(found.results(PLACES))


def test_all_processes_are_ended():
    with running.workers(setup(), "t", 1 << 30) as found:
        processes = [worker.process for worker in found._workers]
    assert all(process.poll() is not None for process in processes)


def test_long_conversations_have_more_time():
    long = Chat(say("a", "b") * 150, [True] * 300)
    assert setup().seconds_for(CHAT) == 10
    assert setup().seconds_for(long) == 40


def test_a_template_has_no_more_memory_than_its_limit() -> None:
    given = setup("{% set text = 'x' * 1100000000 %}", 1 << 30)
    said = "line 1: the template needs more than 1024 MiB of memory"
    with running.workers(given, "t", 0) as found, pytest.raises(UsageError, match=said):
        list(found.results(PLACES[:1]))
