"""What the documentation takes from the code is what the code says now."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from docs.generate import PAGES, PICTURE, RECIPES, draw, estimated_recipe, filled
from fsdpctl.cli.app import _COMMANDS
from fsdpctl.config.compose import compose_config
from fsdpctl.config.files import choices_of
from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.run import open_run
from tests.cli.run import environment, fsdpctl, invoke
from tests.hostile import make_checkpoint, make_hugging_face
from tests.train.chats import make_chat_model, make_chats

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_code(page):
    assert filled(page.read_text()) == page.read_text(), "run `make docs`"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_estimates_of_recipes_are_those_of_the_code(recipe):
    assert estimated_recipe(recipe) == recipe.read_text(), "run `make docs`"
    if recipe.stem != "continue_hugging_face" and "cluster" in recipe.read_text():
        assert ", fits.\n" in recipe.read_text()


@pytest.mark.slow
def test_recipes_would_run(tmp_path, monkeypatch):
    """On ranks of this machine's CPU, which are asked for no more than to begin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shakespeare.txt").write_text("to be or not to be, that is the question\n" * 3000)
    folder = make_hugging_face(make_checkpoint(tmp_path / "step-00000001"), tmp_path / "hf")
    chats = make_chats(tmp_path / "chats.jsonl")
    model = make_chat_model(tmp_path / "model", "qwen3")
    own = {
        "continue_hugging_face": [f"model.path={folder}", "data.path=shakespeare.txt"],
        "finetune_chat": [f"model.path={model}", f"data.path={chats}"],
    }
    for recipe in RECIPES:
        words = ["train", "--recipe", recipe.stem, "--dry-run", "launch.device=cpu"]
        code, said = invoke(*words, *own.get(recipe.stem, []))
        assert code == 0, said


@pytest.mark.slow
def test_the_picture_is_that_of_the_plan(tmp_path):
    draw(tmp_path / "again.png")
    drawn, kept = imread(tmp_path / "again.png"), imread(PICTURE)
    assert drawn.shape == kept.shape
    assert abs(drawn - kept).mean() < 1e-4, "run `make docs`"  # less than the edge of one area


def run_example(strategy: str, *words: str) -> list[str]:
    file = str(ROOT / "docs" / "examples" / "conv_net.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*start, file, strategy, "--steps", "40", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(), "OMP_NUM_THREADS": "1", "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_the_example_learns_the_same_under_every_strategy():
    first, *others = STRATEGIES
    lines = run_example(first, "--steps", "80")  # after half of them it is right by luck
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4
    assert int(lines[-1].split("%")[0].split()[-1]) >= 90  # of new images right
    for strategy in others:
        assert [line for line in run_example(strategy) if line.startswith("step")] == steps[:2]


TEXTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.is_file(), f"{text}: {target}"
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [each.lower().replace(" ", "-") for each in headings]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_commands_and_words_are_those_there_are(page):
    """What stands in code: lines and spans that begin with the command."""
    commands = {name for name, _, _ in _COMMANDS}
    typed = re.findall(r"(?:^    |^\$ |`)fsdpctl ([^`\n]*)", page.read_text(), re.MULTILINE)
    for line in typed:
        name, *words = shlex.split(line.split(" #")[0].replace("…", ""))
        assert name in commands or name.startswith("--"), line
        for word in words:
            key, equals, value = word.lstrip("-").partition("=")
            if equals:
                assert key in KEYS or key in GROUPS, line
                given = value.split(",") if key in GROUPS else []
                assert all(each in choices_of(key) for each in given if each), line


def test_the_readme_fits_on_a_screen_and_names_every_page():
    readme, index = (ROOT / "README.md").read_text(), (ROOT / "docs" / "README.md").read_text()
    assert len(readme.splitlines()) < 85
    pages = {page.name for page in TEXTS} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


@pytest.mark.slow
def test_from_a_directory_to_a_model_that_answers(tmp_path, monkeypatch):
    """The commands of the page, as they stand there, in which nothing else is to be typed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_chat_model(tmp_path / "my_model", "qwen3")
    make_chats(tmp_path / "chats.jsonl")
    page = (ROOT / "docs" / "fine-tune.md").read_text()
    block = page[: page.index("The first line trains nothing")]
    commands = [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("    ")]
    said = []
    for words in commands:
        # A model with such weights has to learn; a real one knows how to talk.
        faster = ["optimizer.lr=0.03", "train.epochs=12"] if words[0] == "train" else []
        done = fsdpctl(*words, *faster, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    assert "⟦" in said[0]
    assert "nothing was trained" in said[0]
    assert "tokens in samples of" in said[2]
    assert said[3] == said[5]  # the merged model says what the run says


def test_the_run_in_the_readme_has_the_name_that_it_has_now():
    """Else the same command would begin anew beside runs from before."""
    run = open_run(compose_config(["launch.device=cpu"]))
    assert f"{run.config.train.run_dir} (new)" in (ROOT / "README.md").read_text()
