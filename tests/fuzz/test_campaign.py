"""2,400 damaged files, each of which a command rejects or reads."""

import json
import random
import subprocess
import sys

import pytest

from tests.commands.run import environment
from tests.fuzz.mutations import damaged_bytes, damaged_json

PARTS, CALLS = 8, 300


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_corrupted_files_are_rejected_in_one_line_or_mean_the_same(part, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.campaign", f"part {part}", str(CALLS)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    *wrong, counted = map(json.loads, result.stdout.splitlines())
    assert ((wrong, counted), list(tmp_path.iterdir())) == (([], {"calls": CALLS, "wrong": 0}), [])


def test_mutations_change_their_input():
    content = json.dumps({"a": [1, {"b": "text"}], "c": 2.5}).encode()
    assert len({damaged_json(content, random.Random(n)) for n in range(200)}) > 100
    assert len({damaged_bytes(content, random.Random(n)) for n in range(200)}) > 100
    assert damaged_json(content, random.Random(1)) == damaged_json(content, random.Random(1))
