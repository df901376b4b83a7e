"""Processes that render templates, also if a process does not reply."""

from unittest.mock import Mock

import pytest

from fsdpctl.chats import template_processes as running
from fsdpctl.chats.formats import Chat
from fsdpctl.chats.template_processes import TemplateSetup, render_chats
from fsdpctl.errors import UsageError
from tests.chats.families import say, template_of
from tests.chats.opened import DATE

pytestmark = pytest.mark.usefixtures("template_processes_of_a_run")
CHAT = Chat(say("a", "b"), [True, True])
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
IN_C = "{{ ([messages] * 1000000) | sum(start=[]) }}"
PLACES = [(CHAT, f"chats.jsonl, line {number}") for number in range(1, 71)]


def setup(template=template_of("chatml"), most_bytes=2 << 30, seconds=10.0):
    controls = r"<\|im_start\|>|<\|im_end\|>"
    policy = ("assistant", "split")
    return TemplateSetup(template, template, {}, controls, DATE, *policy, seconds, most_bytes)


@pytest.mark.slow
def test_replies_of_several_processes_are_in_order(monkeypatch):
    monkeypatch.setattr(running, "_BATCH_BYTES", 4000)
    chats = [(Chat(say("a", str(number)), [True, True]), f"line {number}") for number in range(150)]
    texts = [replies.samples[0].text for replies in render_chats(setup(), "t", chats)]
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    assert texts == [text.format(number) for number in range(150)]


@pytest.mark.parametrize("reply", [b"", b'""\n[[], {}]\n[[', b'{"a": "b"}\n', b"\x93\n"])
def test_a_process_that_exits_or_replies_something_else_is_an_error(reply, monkeypatch):
    def start(files, file):
        file.write(reply)
        return Mock()

    monkeypatch.setattr(running, "_start", start)
    location = "chats.jsonl, line 2" if reply[:2] == b'""' else "t"
    with pytest.raises(UsageError, match=f"{location}: the template ended its process"):
        list(render_chats(setup(), "t", PLACES))


@pytest.mark.slow
def test_processes_are_ended_with_the_first_error(monkeypatch):
    started = []

    def start(files, result):
        started.append(start_as_before(files, result))
        return started[-1]

    start_as_before = running._start
    monkeypatch.setattr(running, "_start", start)
    monkeypatch.setattr(running, "_BATCH_BYTES", 1)
    monkeypatch.setattr(running, "num_cores", lambda: 2)
    endless = "{% if messages[0].content == 'c' %}{{ raise_exception('no') }}{% endif %}" + ENDLESS
    chats = [(Chat(say("c", "b"), [True, True]), "line 1"), *PLACES]
    with pytest.raises(UsageError, match="line 1: no$"):
        list(render_chats(setup(endless), "t", chats))
    assert [each.poll() is not None for each in started] == [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("template", [ENDLESS, IN_C])
def test_a_template_has_no_more_time_than_its_limit_whatever_it_computes(template):
    with pytest.raises(UsageError, match="line 1: the template computes for longer than 1 s"):
        list(render_chats(setup(template, seconds=1.0), "t", PLACES))


def test_long_conversations_have_more_time():
    long = Chat(say("a", "b") * 150, [True] * 300)
    assert (setup().seconds_for(CHAT), setup().seconds_for(long)) == (10, 40)


def test_a_template_has_no_more_memory_than_its_limit() -> None:
    template_setup = setup("{% set text = 'x' * 1100000000 %}", 1 << 30)
    message = "line 1: the template needs more than 1024 MiB of memory"
    with pytest.raises(UsageError, match=message):
        list(render_chats(template_setup, "t", PLACES[:1]))
