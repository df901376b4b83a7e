"""Every documented command line has options, keys and values that exist."""

import re
from pathlib import Path

import pytest

from fsdpctl.config.options import options_of
from fsdpctl.config.schema import GROUPS, KEYS, SECTIONS
from fsdpctl.errors import UsageError
from tests.documented.check import problem_of, read_options
from tests.documented.inputs import make_inputs, make_unfinished_runs, prepared
from tests.documented.lines import PAGES, ROOT, Line, documented_lines, in_comments, in_page

LINES = documented_lines()
# Names of other programs and of Python, and names that a reader replaces.
_ELSEWHERE = {
    "CONTRIBUTING.md": {"prefetch.spare=N"},
    "docs/from-others.md": {
        "model.name", "model.flavor", "model.hf_assets_path", "checkpoint.initial_load_path",
        "optimizer.name", "checkpoint.enable", "checkpoint.interval", "checkpoint.keep_latest_k",
        "strategy=zero1",
    },
    "docs/long-samples.md": {"model.overrides.rope_scaling"},
    "docs/memory-model.md": {"cluster=4xa100_80"},
    "docs/python-api.md": {"model.has_pending_prefetch", "model.config", "model.generate"},
    "docs/training.md": {"model=mine"},
}  # fmt: skip
_checked: set[str] = set()  # a text is checked once for all pages


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    read_options(LINES)
    return make_unfinished_runs(make_inputs(tmp_path_factory.mktemp("documented")))


@pytest.mark.parametrize("source", dict.fromkeys(line.source for line in LINES))
def test_every_command_line_is_accepted(source, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    for line in LINES:
        if line.source == source and line.text not in _checked:
            with prepared(line, inputs):
                problem = problem_of(line)
            assert problem is None, f"{line}\n{problem}"
            _checked.add(line.text)


def wrong_settings(text: str) -> list[str]:
    """Return the settings in spans of a page whose key or value doesn't exist."""
    wrong = []
    for name, value in re.findall(r"`((?:\w+\.)*\w+)(?:=([^`\s]*))?`", text):
        is_key = name.partition(".")[0] in SECTIONS and name not in SECTIONS
        if is_key and any(key.startswith(f"{name}.") for key in KEYS):
            continue  # a subsection
        try:
            if is_key:
                KEYS[name].parse(value) if value and not value.isupper() else KEYS[name]
            elif name in GROUPS and value:
                assert all(each in options_of(name) for each in re.split(r",|\\?\|", value))
        except (AssertionError, KeyError, UsageError):
            wrong.append(f"{name}={value}" if value else name)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_settings_in_sentences_exist(page: str) -> None:
    wrong = wrong_settings((ROOT / page).read_text())
    assert [each for each in wrong if each not in _ELSEWHERE.get(page, ())] == []


def test_a_wrong_setting_in_a_sentence_is_found() -> None:
    text = "`train.steps=2`, `train.steps`, `train.steps=N`, `model.lora`, `strategy=auto`, `a.b=2`"
    assert wrong_settings(text) == []
    wrong = ["train.steps=x", "train.stepz", "train.stepz=2", "strategy=fsdp3", "engine=a,fsdp2"]
    assert wrong_settings("".join(f"`{each}`, " for each in wrong)) == wrong


@pytest.mark.parametrize(("text", "part"), [
    ("`fsdpctl train train.stepz=2`", "train.steps"),
    ("`fsdpctl train model=llama3_1c --dry-run`", "llama3_1b"),
    ("    fsdpctl train --dry-runs", "--dry-runs"), ("    fsdpctl train --recipe quik", "quik"),
    ("```\n$ fsdpctl train \\\n    train.steps=many   # soon\n```", "train.steps=many"),
    ("| do | `fsdpctl train model.trainable=a\\|b modle=hf` |", "modle"),
    ("`fsdpctl estimate-memory --fit microbatch`", "micro_batch"),
    ("`fsdpctl estimate-memory --from run.yml clustr=h100`", "clustr"),
    ("`fsdpctl compare strategy=full_shard,zero --simulate`", "zero"),
    ("`fsdpctl compare --step 3`", "--step"),
    ("`fsdpctl data runs/latest --step 3`", "runs/latest"),
    ("`fsdpctl data\n--run runs/a --rank 1`", "--step"),
    ("`fsdpctl evaluate runs/a data.file=other.txt`", "data.file"),
    ("`fsdpctl evaluates runs/a`", "evaluates"), ("`fsdpctl sample runs/a --top-p 2`", "top-p"),
    ("`fsdpctl consolidate-checkpoint runs/a x --format ggml`", "gguf"),
    ("`fsdpctl --versions`", "--versions"),
    ("    torchrun --nproc-per-node 2 -m fsdpctl train launch=envs", "launch=env"),
    ("    torchrun --nproc 2 docs/examples/conv_net.py", "--nproc"),
    ("    python docs/examples/conv_net.py --step a", "not accepted"),
    ("`python -m benchmarks.step_tim`", "not found"), ("`make tests`", "tests"),
    ("    pip install 'fsdpctl[arrow]'", "arrow"), ("    uv pip install -p x ggufs", "ggufs"),
    ("    uvx --from git+https://a.b/c fsdpctl list", "$FSDPCTL"),
    ("    docker run --rm fsdpctl fsdpctl lists", "lists"),
    ("    sbatch examples/slurm/train.sbatch --recipes x", "--recipes"),
    ("    kubectl apply -f examples/kubernetes/jobs.yaml", "not found"),
])  # fmt: skip
def test_a_wrong_command_line_is_found(text, part, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    (command,) = in_page(f"Some text:\n\n{text}\n\nMore of it.\n")
    problem = problem_of(Line("a page", command))
    assert problem is not None, command
    assert part in problem


def test_commands_are_found_wherever_they_are() -> None:
    span = "Use `fsdpctl\nlist` or\n\n"
    block = "    fsdpctl train \\\n        a=1   # now\n    step 1\n\n"
    fence = "```\n$ make x\nfsdpctl train printed this\n```\n"
    assert list(in_page(f"{span}{block}{fence}`python -m x`")) == [
        "fsdpctl list", "fsdpctl train a=1", "make x", "python -m x",
    ]  # fmt: skip
    header = "# Text:\n#   fsdpctl train a=1\n# Then do it: fsdpctl status\n# with `sky x`.\na: 1\n"
    assert list(in_comments(header)) == ["fsdpctl train a=1", "fsdpctl status", "sky x"]
    assert {"README.md", "docs/training.md"} <= {line.source for line in LINES} & set(PAGES)


def test_the_addresses_of_the_package_and_of_its_image_are_in_one_place_each() -> None:
    files = (*PAGES, "Dockerfile", "pyproject.toml", "examples/kubernetes/job.yaml")
    text = "\n".join((ROOT / each).read_text() for each in files)
    assert len(re.findall(r"\bFSDPCTL=", text)) == 1
    assert len({each.replace("#", "/") for each in re.findall(r"[\w.]+[/#]fsdpctl:\w+", text)}) == 1
