"""The form in which templates receive the arguments of tool calls."""

import json
import re

import pytest

from fsdpctl.chats.formats import Chat
from fsdpctl.chats.render import Renderer
from fsdpctl.chats.rows import read_rows
from fsdpctl.chats.samples import LossPolicy, samples_of

TEXT = '{"x":1,"b":[1,null]}'
LOOP = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "CALL WRITTEN{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(("written", "shown"), [
    ("{{ c.function.arguments }}", TEXT),
    ("{{ c.function.arguments | tojson }}", json.dumps(json.loads(TEXT))),
    ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
     "{{ c.function.arguments | tojson }}{% endif %}", TEXT),
])  # fmt: skip
def test_json_text_reaches_a_template_in_the_form_that_it_takes(written, shown, tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": TEXT}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {"messages": [{"role": "user", "content": "q"}, answer]}
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps(row) + "\n")
    chat = next(iter(read_rows(str(file))[1]))[0].content
    assert isinstance(chat, Chat)
    renderer = Renderer(LOOP.replace("WRITTEN", written), {}, "2026-01-31")
    samples = samples_of(renderer, chat, LossPolicy("assistant", "split"), re.compile("<end>"))
    assert f"CALL {shown}" in samples.samples[0].text
