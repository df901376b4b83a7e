"""`auto` in every command: the selected values, and those that a run stores."""

import json
from pathlib import Path

import pytest
import yaml

from fsdpctl.config.compose import compose_config
from fsdpctl.config.selection import auto_names
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from tests.commands.run import TINY, fsdpctl, invoke, make_text

OPEN = [
    "strategy=auto", "activation_checkpointing=auto", "prefetch=auto",
    "train.micro_batch_size=auto", "launch.share_memory=false",
]  # fmt: skip
H100 = [
    *(word for word in TINY[:-1] if "batch_size" not in word), "model.vocab_size=256",
    "cluster=h100", "launch.nnodes=2", "train.global_batch_size=64",
]  # fmt: skip
NAMES = ("strategy", "activation_checkpointing", "prefetch", "train.micro_batch_size")


def auto_args(folder: Path, *more: str) -> list[str]:
    args = [f"data.path={make_text(folder)}", "train.steps=6", f"train.run_dir={folder / 'run'}"]
    return [*TINY, *args, "launch.nproc_per_node=2", "launch.device=cpu", *more]


def selected(text: str) -> str:
    """Return the selected settings from the output of a command."""
    (line,) = (each for each in text.splitlines() if each.startswith("auto    "))
    return line.removeprefix("auto    ").partition(",")[0]


def test_every_command_selects_the_same(tmp_path):
    args = auto_args(tmp_path, *OPEN, "cluster.memory=0.5066")
    code, text = invoke("estimate-memory", *args)
    assert code == 0
    chosen = dict(arg.split("=") for arg in selected(text).split())
    assert tuple(chosen) == NAMES
    code, text = invoke("estimate-memory", *args, "--json")
    content = json.loads(text[text.index("{") :])  # a note precedes it if there is one core
    text = " ".join(f"{k}={v}" for k, v in chosen.items())
    assert content["selected"]["ranked"][0]["settings"] == text
    assert (content["strategy"], content["verdict"]) == (chosen["strategy"], "fits")
    code, text = invoke("train", "--dry-run", *args)
    assert (code, selected(text)) == (0, " ".join(f"{k}={v}" for k, v in chosen.items()))
    code, text = invoke("train", "--print-config", *args)
    assert code == 0
    recipe = yaml.safe_load(text[text.index("model:") :])
    assert {name: str(recipe[name]) for name in NAMES} == chosen


def test_the_other_settings_are_selected_for_each_strategy():
    code, text = invoke("estimate-memory", *H100, *OPEN[1:3], "--all-strategies", "--json")
    content = json.loads(text)
    assert (code, all("strategy" not in each["selected"]["names"] for each in content)) == (0, True)
    args = {each["strategy"]: each["selected"]["ranked"][0]["settings"] for each in content}
    assert "prefetch=none" in args["no_shard"]
    code, text = invoke("estimate-memory", *H100, *OPEN[1:3], "--all-strategies")
    assert f"full_shard: {args['full_shard'].split()[0]}" in text
    kinds = {each.split()[0].partition("=")[2] for each in args.values()}
    for line in (each for each in text.splitlines() if each.startswith("step ")):
        assert all(kind in line for kind in kinds)  # the heading has the values of all strategies


@pytest.mark.slow
def test_if_nothing_fits_train_fails_and_the_estimate_has_a_verdict(tmp_path):
    short = [*OPEN, "cluster.memory=0.2"]
    code, text = invoke("train", *auto_args(tmp_path, *short))
    assert (code, "MiB needed per rank, 204.8 MiB available" in text) == (3, True)
    assert not (tmp_path / "run").exists()
    code, text = invoke("estimate-memory", *TINY, "model.vocab_size=256", *short, "--require-fit")
    assert (code, "nothing fits; closest is strategy=" in text) == (3, True)
    assert "does not fit" in text


def test_an_existing_run_keeps_the_selection_in_its_configuration(tmp_path):
    settings = auto_args(tmp_path)
    chosen = ["strategy=shard_optimizer", "activation_checkpointing=full", "prefetch=both"]
    more = ["launch.share_memory=false", "train.micro_batch_size=1"]
    plan = make_run_plan(prepare(compose_config([*settings, *chosen, *more])).config)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_to_yaml(plan.config))
    code, text = invoke("train", "--dry-run", *settings, *OPEN)
    assert code == 0
    same = " ".join(chosen)
    assert selected(text) == f"{same} train.micro_batch_size=1"
    assert f"as in {tmp_path / 'run' / 'config.yaml'}" in text
    assert "changed" not in text
    code, text = invoke("train", "--dry-run", *settings, *OPEN, "--resume", "never")
    assert "(assumed CPU specs)" in text


@pytest.mark.slow
def test_a_run_prints_the_selection_and_keeps_it_when_it_resumes(tmp_path):
    settings = auto_args(tmp_path, *OPEN)
    result = fsdpctl("train", *settings, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    first = selected(result.stdout)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert first == " ".join(f"{name}={config[name]}" for name in NAMES)
    longer = [arg for arg in settings if not arg.startswith("train.steps")]
    result = fsdpctl("train", *longer, "train.steps=9", cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (selected(result.stdout), "resumes at step 6" in result.stdout) == (first, True)


@pytest.mark.slow
def test_compare_measures_the_selected_variant_next_to_the_others(tmp_path):
    args = [w for w in auto_args(tmp_path) if not w.startswith(("train.steps", "train.run_dir"))]
    auto = ["strategy=auto,no_shard", "train.micro_batch_size=auto", "--json"]
    result = fsdpctl("compare", *args, *auto, "--steps", "4", cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    strategies = {row["varied"]["strategy"]: row["strategy"] for row in rows}
    assert strategies["auto"] in ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
    assert len({row["final_loss"] for row in rows}) == 1


def test_auto_is_valid_in_a_recipe(tmp_path):
    file = tmp_path / "open.yaml"
    file.write_text("strategy: auto\ntrain: {micro_batch_size: auto}\n")
    assert auto_names(compose_config([], str(file)).config) == (
        "strategy",
        "train.micro_batch_size",
    )
    assert auto_names(compose_config(["strategy=full_shard"], str(file)).config) == (
        "train.micro_batch_size",
    )
