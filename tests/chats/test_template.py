"""Files that templates come from, what templates can use, and what is blocked."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from fsdpctl.chats.render import Renderer, RenderError
from fsdpctl.config.data import DataConfig
from fsdpctl.data.chat_template import open_template
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import DocumentSet
from fsdpctl.data.tokenizer import FileTokenizer, open_tokenizer
from fsdpctl.errors import UsageError
from tests.chats.families import say, template_of, write_tokenizer
from tests.chats.opened import DATE, opened

TALK = say("hello", "good day")


def open_run_tokenizer(folder: Path) -> FileTokenizer:
    tokenizer = open_tokenizer(str(folder))
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def rendered(source, messages=TALK, **kwargs):
    return Renderer(source, {"bos_token": "<s>"}, DATE).render(messages, **kwargs).text


def test_templates_are_found_where_transformers_finds_them(tmp_path):
    folder = write_tokenizer(tmp_path, "chatml", "config")
    options = json.loads((folder / "tokenizer_config.json").read_text())
    cases: list[tuple[dict, str]] = [
        ({}, "config"), ({"chat_template": [{"name": "default", "template": "named"}]}, "named"),
        ({"chat_template.jinja": "file\n"}, "file\n"),
    ]  # fmt: skip
    for change, expected in cases:
        for name, content in change.items():
            if name == "chat_template":
                (folder / "tokenizer_config.json").write_text(json.dumps({**options, **change}))
            else:
                (folder / name).write_text(content)
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        template = open_template(open_run_tokenizer(folder), None)
        assert template.text == theirs.get_chat_template() == expected
        assert template.special_tokens == theirs.special_tokens_map


def test_conversations_with_tools_use_the_template_for_tools(tmp_path):
    folder = write_tokenizer(tmp_path, "chatml")
    config = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": named}))
    template = open_template(open_run_tokenizer(folder), None)
    assert (template.text, template.tool_text) == ("a", "b")


def test_a_given_file_is_used_and_a_missing_template_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="has no chat template.* set data.template=FILE"):
        opened(tmp_path, "chatml", [{"messages": TALK}], template="")
    file = tmp_path / "own.jinja"
    file.write_text(template_of("chatml"))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "chatml", "")
    config = DataConfig(
        name="chat", path=str(tmp_path / "chats.jsonl"), tokenizer=str(tokenizer),
        template=str(file), val_fraction=0,
    )  # fmt: skip
    data = open_data(config)
    assert isinstance(data.train, DocumentSet)
    assert (len(data.train), any(str(file) in note for note in data.notes)) == (1, True)


def test_templates_have_the_variables_of_transformers():
    assert rendered("{{ bos_token }}{{ tools }}{{ documents }}{{ add_generation_prompt }}") == (
        "<s>NoneNoneFalse"
    )
    assert rendered("{{ eos_token is defined }}") == "False"
    assert rendered("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "31 Jan 2026"
    assert rendered("{% for m in messages %}{% break %}{% endfor %}x\n\n") == "x\n"
    assert rendered("{{ enable_thinking }}", options={"enable_thinking": False}) == "False"
    assert rendered("{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}") == "2"


BREAKOUTS = [
    "{{ messages.__class__ }}", "{{ messages.__class__.__mro__ }}",
    "{{ '{0.__class__}'.format(messages) }}", "{{ messages | attr('__class__') }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__self__ }}", "{{ dict.__init__ }}",
    "{{ namespace(__init__=1) }}", "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}", "{% include 'x' %}", "{% import 'x' as y %}",
    "{{ lipsum.__globals__ }}", "{{ self.__init__ }}", "{{ cycler.__init__.__globals__ }}",
]  # fmt: skip


@pytest.mark.parametrize("source", BREAKOUTS)
def test_templates_cannot_reach_private_attributes(source):
    with pytest.raises(RenderError):
        rendered(source)
    assert rendered("{{ ''['__class__'] }}") == ""  # a constant, undefined


@pytest.mark.parametrize(("source", "error"), [
    ("{% for", "line 1 of the template"), ("{% if x %}", "Unexpected end of template"),
    ("{{ x | nothing }}", "nothing"), ("{% break %}", "outside loop"),
    ("{% do x %}", "unknown tag"),
])  # fmt: skip
def test_invalid_templates_are_rejected(source, error, tmp_path):
    with pytest.raises(UsageError, match=f"tokenizer_config.json: chat_template: .*{error}"):
        opened(tmp_path, "chatml", [{"messages": TALK}], source)


def test_errors_of_a_template_name_the_line(tmp_path):
    rows = [{"messages": TALK}, {"messages": say("a", "b", system="no")}]
    with pytest.raises(UsageError, match=r"line 2: System role not supported$"):
        opened(tmp_path, "gemma2", rows)


def test_a_template_of_two_days_has_the_date_of_each():
    source = "{{ strftime_now('%d %b %Y') }}"
    one, other = (Renderer(source, {}, today) for today in ("2026-01-31", "2025-06-01"))
    assert [each.render([]).text for each in (one, other, one)] == [
        "31 Jan 2026", "01 Jun 2025", "31 Jan 2026",
    ]  # fmt: skip


def test_templates_get_the_configured_date(tmp_path):
    rows = [{"messages": TALK}]
    first = opened(tmp_path, "llama32", rows)
    assert "31 Jan 2026" in first.tokenizer.decode(first.train.tokens.tolist())
    other = opened(tmp_path, "llama32", rows, date="2025-06-01")
    assert other.fingerprint != first.fingerprint
    assert other.date == "2025-06-01"
    undated = [opened(tmp_path, "chatml", rows, date=date) for date in (DATE, "2025-06-01", None)]
    assert len({each.fingerprint for each in undated}) == 1
    with pytest.raises(UsageError, match="data.date=today: expected a day"):
        opened(tmp_path, "llama32", rows, date="today")


@pytest.mark.usefixtures("template_processes_of_a_run")
def test_the_child_imports_nothing_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert len(opened(tmp_path, "chatml", [{"messages": TALK}]).train) == 1
