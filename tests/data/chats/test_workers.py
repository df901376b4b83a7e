"""The processes that templates run in, where they do not answer."""

import pytest

from fsdpctl.data.chats import workers as running
from fsdpctl.data.chats.child import Setup, seconds_for
from fsdpctl.data.chats.rows import Chat
from fsdpctl.errors import UsageError
from tests.data.chats.families import say, template_of
from tests.data.chats.opened import DATE

CHAT = Chat(say("a", "b"), [True, True])
PLACES = [(CHAT, f"chats.jsonl, line {number}") for number in range(1, 71)]


def setup():
    template = template_of("chatml")
    controls = r"<\|im_start\|>|<\|im_end\|>"
    return Setup(template, template, {}, controls, DATE, "assistant", "split", 10.0, 2 << 30)


def test_answers_come_in_order_from_several_processes():
    with running.workers(setup(), "t", 1 << 30) as found:
        chats = [
            (Chat(say("a", str(number)), [True, True]), f"line {number}") for number in range(150)
        ]
        texts = [made.samples[0].text for made in found.results(chats)]
    assert texts == [
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{number}<|im_end|>\n"
        for number in range(150)
    ]


def test_a_process_that_ends_is_told_with_the_lines_that_it_had():
    with running.workers(setup(), "t", 0) as found:
        results = found.results(PLACES)
        next(results)
        found._processes[0].kill()
        with pytest.raises(
            UsageError, match="line 33 .to chats.jsonl, line 64.: the process of the"
        ):
            list(results)


def test_a_process_that_stands_still_is_given_up(monkeypatch):
    monkeypatch.setattr(running, "_PATIENCE", 0)
    with pytest.raises(UsageError, match="^t: the template does not come to an end$"):
        running.Workers(setup(), "t", 1)


def test_no_process_is_left_over():
    with running.workers(setup(), "t", 1 << 30) as found:
        processes = found._processes
    assert all(process.poll() is not None for process in processes)


def test_long_conversations_may_compute_for_longer():
    long = Chat(say("a", "b") * 150, [True] * 300)
    assert seconds_for(setup(), CHAT) == 10
    assert seconds_for(setup(), long) == 40
