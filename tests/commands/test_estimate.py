"""`fsdpctl estimate-memory`: its text and JSON."""

import json
import re
import shutil
from pathlib import Path

import pytest

from fsdpctl.io.terminal import wrapped
from fsdpctl.io.texts import format_bytes
from fsdpctl.plan.strategy import STRATEGIES
from tests.commands.run import invoke

OTHERS = Path(__file__).parent.parent / "importers" / "files"
H100 = ["model=llama3_8b", "cluster=h100"]
LENGTH = ["train.tokens=10e9", "cluster.price=2"]


def test_one_strategy_as_json():
    code, text = invoke("estimate-memory", *H100, *LENGTH, "--json")
    content = json.loads(text)
    assert (code, content["strategy"]) == (0, "full_shard")
    assert content["steps"] == -(-(10**10) // content["tokens_per_step"])
    assert content["hours"] == content["steps"] * content["step_seconds"] / 3600
    assert (content["gpu_hours"], content["cost"]) == (8 * content["hours"], 16 * content["hours"])
    assert content["error_band"]["kind"] == "dense"
    assert content["notes"] == []
    assert content["peak_allocated_bytes"] == sum(content["breakdown"].values())
    assert content["verdict"] == "fits"
    assert content["peak_reserved_bytes"] >= content["peak_allocated_bytes"]
    assert content["tokens_per_step"] == 16 * 4096
    assert content["largest"][0]["bytes"] > 0
    assert content["breakdown"]["parameters"] >= 4 * content["num_parameters"] / 8


def test_every_strategy_as_json():
    code, text = invoke("estimate-memory", *H100, "--all-strategies", "--json")
    content = {each["strategy"]: each for each in json.loads(text)}
    assert code == 0
    assert list(content) == [name for name, row in STRATEGIES.items() if not row.replicates]
    assert content["no_shard"]["verdict"] == "too_large"
    code, text = invoke("estimate-memory", *H100, "--all-strategies", LENGTH[0])
    assert "cost at 3.99 USD per GPU hour: Lambda, 8x H100 SXM, on 2026-09-20 (" in text
    least = min(content.values(), key=lambda each: each["peak_allocated_bytes"])
    assert least["strategy"] == "full_shard"


def test_the_text_has_the_breakdown_and_the_margin():
    code, text = invoke("estimate-memory", *H100)
    assert code == 0
    parts = ("activations", "reserved by the allocator", "peak at: ", "to spare", "tok/s (specs")
    assert all(part in text for part in parts)
    assert "GPU hours" not in text
    code, text = invoke("estimate-memory", *H100, "--all-strategies")
    assert (code, all(name in text for name in STRATEGIES)) == (0, True)


def test_the_length_of_a_run_is_known_by_its_data_or_the_reason_is_printed(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some words\n" * 10_000)
    args = [*H100, "data=text", "train.epochs=3", "train.seq_len=128", "data.val_fraction=0"]
    path = f"data.path={tmp_path / 'text.txt'}"
    _, text = invoke("estimate-memory", *args, path, "cluster.price=2")
    steps = -(-3 * (110_000 // 128) // 16)
    assert f"length  {steps} steps of 2,048 tokens: " in text
    assert " GPU hours (" in text
    assert ", cost 0." in text
    _, text = invoke("estimate-memory", *args, "data.path=no")
    assert "size of the data unknown; set train.tokens (data.path=no: not found" in text
    _, text = invoke("estimate-memory", "train.steps=10")
    assert "time    launch.device=cpu: times are predicted for GPUs only; set cluster" in text
    assert "length  10 steps of 2,048 tokens" in text
    monkeypatch.setattr("fsdpctl.data.open_estimated.EXACT_BYTES", 1 << 10)
    monkeypatch.setattr("fsdpctl.data.open_estimated.EXCERPT_BYTES", 1 << 7)
    (tmp_path / "text.txt").write_text("other words\n" * 10_000)
    _, text = invoke("estimate-memory", *args, path)
    assert " tokens (±0.0%: tokens of the data are estimated): " in text
    code, text = invoke("train", "cluster.price=2", "--dry-run")
    assert (code, "for estimates and compare --simulate only" in text) == (2, True)


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_has_changes_and_an_exit_code():
    code, text = invoke("estimate-memory", *H100, *LENGTH, "strategy=no_shard", "--require-fit")
    assert (code, "does not fit" in text) == (3, True)
    items = text.split("to fit  ")[1].splitlines()
    assert items[0].startswith("1. strategy=full_shard: ")
    assert items[1].startswith("        2. ")
    for item in items[:3]:
        assert re.search(r" GiB, [\d.]+ s/step, [\d,]+ GPU hours, cost [\d,]+", item)
        first, *more = wrapped(f"        {item.strip()}", 100).splitlines()
        assert len(more) <= 1
        assert all(line.startswith(" " * 11) and line[11] != " " for line in more)


def test_other_engines_are_estimated_and_their_strategies_named():
    code, text = invoke("estimate-memory", *H100, "engine=fsdp2", "--all-strategies", "--json")
    content = [each["strategy"] for each in json.loads(text)]
    assert code == 0
    assert content == [n for n, x in STRATEGIES.items() if x.shards_params and not x.replicates]
    code, text = invoke("estimate-memory", *H100, "engine=ddp", "strategy=no_shard", "--json")
    assert json.loads(text)["engine"] == "ddp"


@pytest.mark.slow
def test_the_largest_model_of_each_strategy_is_drawn(tmp_path):
    args = ["model=gpt2", "cluster=a100_40", "cluster.memory=6GiB", "--fit", "model"]
    code, text = invoke("estimate-memory", *args, "--all-strategies", "--plot", str(tmp_path))
    assert code == 0
    alone = [name for name, row in STRATEGIES.items() if not row.replicates]
    assert text.count("model.num_layers=") == len(alone)
    assert [path.name for path in tmp_path.iterdir()] == ["strategies.png"]


def test_more_ranks_than_samples_are_supported():
    code, text = invoke("estimate-memory", *H100, "launch.nnodes=64", "--json")
    assert (code, json.loads(text)["world_size"]) == (0, 512)


LLAMA = "NousResearch/Meta-Llama-3.1-8B"


@pytest.mark.slow
def test_a_configuration_of_another_tool_is_translated_and_estimated(tmp_path):
    args = ["--from", str(OTHERS / "axolotl-full.yaml"), "cluster=h200"]
    code, text = invoke("estimate-memory", *args)
    assert code == 0
    for part in ("base_model: model=hf model", "accumulation=last", "no effect on memory"):
        assert part in text
    code, text = invoke("estimate-memory", *args, "strategy=no_shard", "--json")
    content = json.loads(text)
    assert (code, (content["strategy"], content["world_size"])) == (0, ("no_shard", 8))
    assert content["from"]["tool"] == "axolotl"
    assert "strategy=full_shard" in content["from"]["overridden"]
    (row,) = (each for each in content["from"]["rows"] if each["key"] == "base_model")
    assert row["settings"] == ["model=hf", f"model.path={LLAMA}"]
    code, text = invoke("estimate-memory", *args, "--json")
    recipe = str(tmp_path / "recipe.yaml")
    assert invoke("convert", args[1], "cluster=h200", "data.path=x.jsonl", "--out", recipe)[0] == 0
    program = ["engine=fsdp2", "accumulation=last", "precision.reduce_dtype=bfloat16"]
    program += ["train.loss_chunk_tokens=0", "data.packing=auto"]
    ours = "engine.program=fsdpctl"
    _, alone = invoke("estimate-memory", *args, "data.path=x.jsonl", ours, "--json")
    for each, added in ((text, program), (alone, [])):
        code, same = invoke("estimate-memory", recipe, *added, "--json")
        assert (code, json.loads(same)) == (
            0,
            {k: v for k, v in json.loads(each).items() if k != "from"},
        )


@pytest.mark.slow
def test_settings_that_a_file_of_another_tool_lacks_are_reported():
    file = str(OTHERS / "axolotl-qlora.yml")
    code, text = invoke("estimate-memory", "--from", file, "cluster=h100")
    assert (code, "model.base_dtype=nf4" in text, "strategy.offload=all" in text) == (0, True, True)
    assert "unknown may change the estimate: a_key_of_tomorrow" in text
    assert "engine  fsdpctl: strategy.offload=all requires it instead of " in text
    code, out = invoke("estimate-memory", "--from", file, "--recipe", "shakespeare")
    assert (code, "pass only one" in out) == (2, True)
    args = ["--from", str(OTHERS / "axolotl-full.yaml"), "cluster=h100", "--all-strategies"]
    code, text = invoke("estimate-memory", *args, "--json")
    assert {each["from"]["tool"] for each in json.loads(text)} == {"axolotl"}


@pytest.mark.slow
def test_host_memory_has_to_fit_too():
    args = [*H100, "strategy.offload=states"]
    code, text = invoke("estimate-memory", *args, "--require-fit")
    assert (code, "per node (fits)" in text) == (0, True)
    code, text = invoke("estimate-memory", *args, "cluster.host_memory=64GiB", "--json")
    content = json.loads(text)
    assert code == 0
    assert (content["verdict"], content["node_host_memory_bytes"]) == ("too_large", 64 << 30)
    assert content["node_host_bytes"] == 8 * content["host_bytes"]
    # Master weights and moments take 12 bytes per parameter and node.
    assert content["node_host_bytes"] > 12 * content["num_parameters"]
    assert content["margin_bytes"] == ((64 << 30) - content["node_host_bytes"]) // 8
    code, text = invoke("estimate-memory", *H100, "cluster.host_memory=8GiB", "--require-fit")
    assert (code, "does not fit" in text, "to spare" in text) == (3, True, False)


@pytest.mark.slow
def test_several_files_of_other_tools_have_a_verdict_each(tmp_path):
    for name in ("axolotl-full.yaml", "axolotl-qlora.yml"):
        shutil.copy(OTHERS / name, tmp_path / name)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "dpo.yaml").write_text("base_model: meta-llama/Llama-3.1-8B\nrl: dpo\n")
    args = ["estimate-memory", "--from", str(tmp_path), "cluster=8xrtx4090"]
    file = str(tmp_path / "axolotl-full.yaml")
    _, alone = invoke("estimate-memory", "--from", file, *args[3:], "--json")
    code, text = invoke(*args, "--require-fit")
    large, small, refused, named = text.splitlines()
    assert (code, named.endswith(f"not estimated: {tmp_path / 'below' / 'dpo.yaml'}")) == (3, True)
    size = format_bytes(json.loads(alone)["peak_reserved_bytes"])
    assert f"{tmp_path / 'axolotl-full.yaml'}: does not fit, {size} of " in large
    assert "axolotl-qlora.yml: fits, " in small
    assert "dpo.yaml: " in refused
    assert ("trains on preferences" in refused, invoke(*args)[0]) == (True, 0)
    one = ["estimate-memory", "--from", str(tmp_path / "below"), *args[3:]]
    assert (invoke(*one)[0], invoke(*one, "--require-fit")[0]) == (2, 3)
    fitting = [*args[:2], str(tmp_path / "axolotl-qlora.yml"), *one[1:], "--require-fit"]
    assert invoke(*fitting)[0] == 3
    for wrong, messages in (
        (["clustr=h100"], "did you mean cluster"),
        (["--from", "no.yml"], "not found"),
        (["my.yaml"], "pass only one"),
    ):
        code, text = invoke(*args, *wrong)
        assert (code, messages in text, "\n" in text.strip()) == (2, True, False)
    for option in (["--fit", "seq_len"], ["--json"]):
        code, text = invoke(*args, *option)
        assert (code, "take a single file" in text) == (2, True)
