"""The documentation agrees with the code: generated parts, links and file names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from docs.generate import (
    PAGES,
    PICTURE,
    RECIPES,
    SIMULATION,
    UNITS,
    draw,
    draw_simulation,
    estimated_recipe,
    filled,
)
from docs.how_it_works import draw_how_it_works
from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import KEYS, SECTIONS
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.prepare import prepare
from tests.commands.run import environment, invoke
from tests.hostile import make_checkpoint, make_hugging_face
from tests.training.chats import make_chat_model, make_chats

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT, ROOT / "fsdpctl")


# A page with 17 estimates takes 14 CPU seconds.
SLOW = {"out-of-memory.md": pytest.mark.slow}


@pytest.mark.parametrize(
    "page", [pytest.param(each, id=each.name, marks=SLOW.get(each.name, ())) for each in PAGES]
)
def test_generated_tables_are_up_to_date(page):
    assert filled(page.read_text()) == page.read_text(), "run `make docs`"


EVIDENCE = (ROOT / "docs" / "method" / "evidence.md").read_text()
PROMISES = [line for line in EVIDENCE.splitlines() if line.startswith("| [")]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda line: line[3:].partition("]")[0])
def test_every_promise_has_tests_that_exist_and_threads_of_their_repositories(promise):
    tests = re.findall(r"\[`(test_\w+)`\]\(\.\./\.\./(tests/[\w/]+\.py)\)", promise)
    assert len(tests) == promise.count("[`test_") > 0
    for name, file in tests:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}: not found"
    for name, number, url in re.findall(r"\[([\w.-]+)#(\d+)\]\((\S+?)\)", promise):
        assert re.fullmatch(rf"https://github.com/[\w-]+/{name}/issues/{number}", url), url


def test_the_page_of_evidence_says_how_each_figure_is_measured_again():
    bench = (ROOT / "Makefile").read_text().split("\nbench:")[1].split("\n\n")[0]
    used = set(re.findall(r"\(\.\./\.\./benchmarks/results/([\w-]+)\.json\)", EVIDENCE))
    again = used & set(re.findall(r"/([\w-]+)\.json", bench))
    page = " ".join(EVIDENCE.split())
    named = [
        set(re.findall(r"`([\w-]+)`", part))
        for part in re.findall(
            r"(?:`make bench`|benchmarks.NAME`) measures (.*?)(?: again|,? and `py)", page
        )
    ]
    assert named == [again, {each.replace("-", "_") for each in used - again - {"faults"}}]


def test_the_pages_name_what_the_self_check_prints_and_stops():
    output = (ROOT / "README.md").read_text().split("$ fsdpctl train\n")[1].split("```")[0]
    labels = [line.partition(" ")[0] for line in output.splitlines()]
    at = labels.index("self-check:")
    assert (labels[at - 1], labels[at + 1]) == ("run", "step")
    pages = (ROOT / "docs" / "reliability.md").read_text()
    restarts = pages.partition("fsdpctl doesn't restart after")[2].partition(".\n\n")[0]
    assert "[self-check](training.md#first-step)" in restarts


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_estimates_in_recipes_are_up_to_date(recipe):
    assert estimated_recipe(recipe) == recipe.read_text(), "run `make docs`"
    if recipe.stem != "continue_hugging_face" and "cluster" in recipe.read_text():
        assert ", fits.\n" in recipe.read_text()


@pytest.mark.slow
def test_every_recipe_passes_a_dry_run(tmp_path, monkeypatch):
    """The dry runs use CPU ranks, which need neither the devices nor the memory of the cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shakespeare.txt").write_text("to be or not to be, that is the question\n" * 3000)
    folder = make_hugging_face(make_checkpoint(tmp_path / "step-00000001"), tmp_path / "hf")
    chats = make_chats(tmp_path / "chats.jsonl")
    model, experts = (make_chat_model(tmp_path / each, each) for each in ("qwen3", "qwen3_moe"))
    inputs = {
        "continue_hugging_face": [f"model.path={folder}", "data.path=shakespeare.txt"],
        "finetune_chat": [f"model.path={model}", f"data.path={chats}"],
    }
    of_experts = [f"model.path={experts}", f"data.path={chats}", "train.seq_len=64"]
    inputs |= {each.stem: of_experts for each in RECIPES if "model.path: " in each.read_text()}
    for recipe in RECIPES:
        arguments = ["train", "--recipe", recipe.stem, "--dry-run", "launch.device=cpu"]
        code, output = invoke(*arguments, *inputs.get(recipe.stem, []), "train.require_fit=false")
        assert code == 0, output


def test_the_picture_of_units_is_up_to_date(tmp_path):
    draw_how_it_works(tmp_path / "new.svg")
    assert (tmp_path / "new.svg").read_text() == UNITS.read_text(), "run `make docs`"


@pytest.mark.slow
def test_the_pictures_are_up_to_date(tmp_path):
    draw(tmp_path / "new.png")
    drawn, committed = imread(tmp_path / "new.png"), imread(PICTURE)
    assert drawn.shape == committed.shape
    assert abs(drawn - committed).mean() < 1e-4, "run `make docs`"  # the border of an area has more
    draw_simulation(tmp_path / "new.svg")
    assert (tmp_path / "new.svg").read_text() == SIMULATION.read_text(), "run `make docs`"


def run_example(strategy: str, *options: str) -> list[str]:
    file = str(ROOT / "docs" / "examples" / "conv_net.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*start, file, strategy, "--steps", "40", *options], capture_output=True, text=True,
        timeout=120,
        env={**environment(), "OMP_NUM_THREADS": "1", "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_the_example_prints_the_same_losses_with_every_strategy():
    first, *others = STRATEGIES
    lines = run_example(first, "--steps", "80")  # after 40 steps, the accuracy varies too much
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4
    assert int(lines[-1].split("%")[0].split()[-1]) >= 90  # percent of new images
    for strategy in others:
        assert [line for line in run_example(strategy) if line.startswith("step")] == steps[:2]


DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))


def anchors_of(page: Path) -> set[str]:
    """Return the targets of links to a page, of which GitHub makes one for each heading."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
    return anchors | set(re.findall('<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_links_have_targets(page):
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.is_file(), f"{text}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{text}: {target}"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_named_source_files_exist(page):
    """Paths are relative to the repository or to fsdpctl/."""
    named = re.findall(r"`([\w/]+/(?:\w+\.(?:py|sbatch))?)`", page.read_text())
    paths = [each for each in named if each.endswith((".py", ".sbatch")) or each[:4] == "test"]
    assert [each for each in paths if not any((top / each).exists() for top in SOURCES)] == []


def test_the_readme_is_short_and_the_index_names_every_page():
    readme, index = (ROOT / "README.md").read_text(), (ROOT / "docs" / "README.md").read_text()
    assert len(readme.splitlines()) < 85
    pages = {str(page.relative_to(ROOT / "docs")) for page in DOCUMENTS[1:]} - {"README.md"}
    assert {page for page in pages if index.count(f"({page})") != 1} == set()


def test_every_setting_can_be_linked():
    text = (ROOT / "docs" / "settings.md").read_text()
    anchors = {*re.findall(r'<a id="([^"]+)">', text)}
    assert anchors == {n for n, k in KEYS.items() if not k.user_key}
    assert set(re.findall(r"^## (.*)$", text, re.MULTILINE)) == set(SECTIONS)


def test_the_run_directory_in_the_readme_is_current():
    """A different name would mean that existing runs no longer resume."""
    run = prepare(compose_config(["launch.device=cpu"]))
    assert f"{run.config.train.run_dir} (new)" in (ROOT / "README.md").read_text()
