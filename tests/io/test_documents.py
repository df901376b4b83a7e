"""Limits on untrusted JSON and YAML."""

import json
import math
import os
from dataclasses import dataclass

import pytest

from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import MAX_READ_BYTES
from fsdpctl.io.untrusted import MAX_DEPTH, parse_json, read_json, read_yaml


@dataclass(frozen=True, slots=True)
class Shape:
    width: int
    name: str = ""


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(("text", "error"), [
    (nested(100_000), "deeper than 64"), (nested(MAX_DEPTH + 1), "deeper than 64"),
    ('{"a": ' * 70 + "1" + "}" * 70, "deeper than 64"), ('{"a": 1, "a": 1}', "a appears twice"),
    ('{"b": {"a": 1, "a": 2}}', "a appears twice"), ("NaN", "not a number"),
    ("[-Infinity]", "not a number"), ("1e999", "number too large"), ("9" * 5000, "not JSON"),
    ("{", "not JSON"), (b"\xff", "not JSON"), ("\ud800", "Invalid|not JSON"),
])  # fmt: skip
def test_malformed_json_is_rejected(text, error):
    with pytest.raises(CheckpointError, match=error) as caught:
        parse_json(text, dict, "where.json", CheckpointError)
    assert str(caught.value).startswith("where.json: ")


@pytest.mark.parametrize("content", [
    {"width": "3"}, {"width": 3.0}, {"width": True}, {"width": None}, {}, [], 3,
    {"width": 1, "name": 2}, {"width": 1, "name": None},
])  # fmt: skip
def test_types_are_not_converted(content):
    with pytest.raises(UsageError, match="Expected|missing required"):
        parse_json(json.dumps(content), Shape, "x")


def test_valid_json_is_unchanged():
    assert parse_json('{"width": 3, "more": []}', Shape, "x") == Shape(3)
    text = json.dumps({"text": "[" * 500 + '"\\"{', "deep": json.loads(nested(MAX_DEPTH - 1))})
    assert parse_json(text, dict, "x") == json.loads(text)
    assert math.isinf(parse_json('{"a": Infinity}', dict, "x", finite=False)["a"])


def test_large_and_undecodable_files_are_rejected(tmp_path):
    file = tmp_path / "x.json"
    file.touch()
    os.truncate(file, MAX_READ_BYTES + 1)
    with pytest.raises(UsageError, match="larger than the limit of 1,024 MiB"):
        read_json(file, dict)
    file.write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(UsageError, match="not UTF-8"):
        read_json(file, dict)


@pytest.mark.parametrize(("text", "error"), [
    ("a: 1\nb: 2\na: 3\n", "a appears twice"), ("a: {b: 1, b: 2}\n", "b appears twice"),
    ("a: &a x\nb: *a\n", "line 2: aliases are not supported"),
    ("a: " + nested(3000), "nested too deeply"),
    ("a: [\n  1", "not YAML: line 2, column 4: expected"),
    ("a: \x01", r"special characters are not allowed at position 3"),
])  # fmt: skip
def test_malformed_yaml_is_rejected(tmp_path, text, error):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=error) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_scalars_of_yaml_are_text(tmp_path):
    (tmp_path / "x.yaml").write_text("a: 1e3\nb: true\nc: ${oc.env:HOME}\nd: !!python/name:os.x 1")
    result = read_yaml(tmp_path / "x.yaml")
    assert result == {"a": "1e3", "b": "true", "c": "${oc.env:HOME}", "d": "1"}
