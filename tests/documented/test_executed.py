"""Documented command lines run to their end, with smaller sizes and nothing else changed."""

import importlib.util
import shlex
from pathlib import Path

import pytest

from fsdpctl.errors import DoesNotFitError
from tests.commands.run import fsdpctl
from tests.documented.execute import ONLY_CHECKED, PACKAGES, execute, reason_to_only_check
from tests.documented.inputs import RUNS, make_inputs, prepared
from tests.documented.lines import ROOT, Line, documented_lines
from tests.training.chats import make_chat_model, make_chats

# Each text once: the same command has the same inputs on every page.
TEXTS = {line.text: line for line in documented_lines()}
EXECUTED = [line for line in TEXTS.values() if reason_to_only_check(line) is None]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("documented"))
    for text in RUNS:
        (done,) = execute(Line("", text), folder)
        assert done.returncode == 0, done.stdout
    return folder


def test_every_reason_not_to_execute_a_line_applies_to_one() -> None:
    assert set(ONLY_CHECKED.values()) <= {reason_to_only_check(line) for line in TEXTS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("line", EXECUTED, ids=lambda line: line.text)
def test_the_command_line_runs(line: Line, inputs: Path) -> None:
    """A dry run may find that a large model does not fit on this machine."""
    for arg, package in PACKAGES.items():
        if arg in line.args and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    accepted = (0, DoesNotFitError.exit_code) if "--dry-run" in line.args else (0,)
    with prepared(line, inputs):
        for done in execute(line, inputs):
            assert done.returncode in accepted, f"{line}\n{shlex.join(done.args)}\n{done.stdout}"


@pytest.mark.slow
def test_the_fine_tuning_commands_run_one_after_another(tmp_path, monkeypatch):
    """The merged model generates the same text as the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_chat_model(tmp_path / "my_model", "qwen3")
    make_chats(tmp_path / "chats.jsonl")
    page = (ROOT / "docs" / "fine-tune.md").read_text()
    block = page[: page.index("The first command does not train")]
    commands = [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("    ")]
    outputs = []
    for arguments in commands:
        # Its random weights need more training than a pretrained model.
        faster = ["optimizer.lr=0.03", "train.epochs=12"] if arguments[0] == "train" else []
        done = fsdpctl(*arguments, *faster, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert "⟦" in outputs[0]
    assert "nothing was trained" in outputs[0]
    assert ("tokens in samples of" in outputs[2], outputs[3]) == (True, outputs[5])
