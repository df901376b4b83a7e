"""`fsdpctl compare`: the variants and the results."""

import json
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fsdpctl.commands.compare import results
from fsdpctl.commands.compare.report import NOT_REACHED, OK
from fsdpctl.commands.compare.variants import drop_unsupported, variants_of
from fsdpctl.config.clusters import price_source
from fsdpctl.config.compose import compose_config
from fsdpctl.config.options import options_of
from fsdpctl.errors import UsageError
from fsdpctl.plan.strategy import STRATEGIES
from tests.commands.run import TINY, command, environment, fsdpctl, invoke, make_text
from tests.commands.test_interruptions import ranks_of, reset_signals, wait_for
from tests.run.runs import step_line, write_lines


def labels(*args: str) -> list[str]:
    return [each.result.label for each in variants_of(list(args), None, simulates=False)]


def test_commas_separate_alternatives_of_choices_and_numbers():
    assert labels("strategy=full_shard,no_shard", "train.micro_batch_size=1,2") == [
        "strategy=full_shard train.micro_batch_size=1",
        "strategy=full_shard train.micro_batch_size=2",
        "strategy=no_shard train.micro_batch_size=1", "strategy=no_shard train.micro_batch_size=2",
    ]  # fmt: skip


def test_commas_in_paths_are_commas():
    (only,) = variants_of(["strategy=no_shard", "data.path=a,b"], None, simulates=False)
    assert only.composed.config.data.path == "a,b"


def test_without_alternatives_all_strategies_are_compared():
    assert labels() == [f"strategy={name}" for name in STRATEGIES]
    assert labels("strategy=no_shard") == ["strategy=no_shard"]


def test_values_are_ignored_for_strategies_that_do_not_use_them():
    result = variants_of(["strategy.owner_map=balanced"], None, simulates=False)
    maps = {each.composed.config.strategy.name: each.composed.config.strategy for each in result}
    assert (maps["shard_optimizer"].owner_map, maps["full_shard"].owner_map) == ("balanced", None)


def test_duplicate_alternatives_are_merged():
    assert labels("strategy=no_shard,no_shard") == ["strategy=no_shard"]


@pytest.mark.parametrize(("arg", "part"), [
    ("strategy=full_shard,no_shrad", "did you mean no_shard?"),
    ("strategy=full_shard,", "empty alternative"),
    ("train.micro_batch_size=1,x", "train.micro_batch_size=x"), ("train.steps=5,6", "--steps"),
    ("cluster.price=1,2", "one for each of the 0 values of cluster"),
    ("train.run_dir=here", "not supported by compare"), ("strateg=a,b", "did you mean strategy?"),
])  # fmt: skip
def test_mistakes_are_reported_before_anything_runs(arg, part):
    with pytest.raises(UsageError) as caught:
        labels(arg)
    assert part in str(caught.value)


def test_prices_are_those_of_the_clusters_in_their_order():
    args = ["cluster=h100,a10", "cluster.price=3,1", "launch.nnodes=1,2", "train.tokens=1e9"]
    result = variants_of(args, None, simulates=True)
    assert [each.result.varied["cluster.price"] for each in result] == ["3", "3", "1", "1"]
    assert {each.composed.config.train.tokens for each in result} == {10**9}
    code, out = invoke("compare", "--simulate", *args[:3], "--by", "cost")
    assert (code, "requires cluster.price and a length" in out) == (2, True)


def test_a_price_of_a_cluster_has_a_source_and_a_day():
    for name in options_of("cluster"):
        config = compose_config([f"cluster={name}"]).config
        source = price_source(name)
        assert (config.cluster.price is None) == (source == "")
        assert not source or re.search(r", on 2026-\d\d-\d\d \(.+\)$", source)
    assert compose_config(["cluster=h100", "cluster.price=2"]).config.cluster.price == 2


def test_a_budget_names_the_cheapest_that_ends_and_what_it_buys_of_others():
    args = ["--simulate", "cluster=h100,a100_80,mi300x", "launch.nnodes=1,2", "--budget", "0.1"]
    code, out = invoke("compare", *args, "train.steps=500", "--json")
    rows = json.loads(out[out.index("[\n") : out.rindex("]") + 1])
    assert (code, len(rows)) == (0, 6)
    priced = [row for row in rows if row["price"] is not None]
    assert {row["varied"]["cluster"] for row in priced} == {"h100", "a100_80"}
    for row in priced:
        steps = row["budget_steps"] * row["cost"] / 500
        assert 0.1 - row["cost"] / 500 <= steps <= 0.1
        assert row["budget_tokens"] == row["budget_steps"] * 16 * 128
    code, out = invoke("compare", *args, "train.steps=500")
    cheapest = min(priced, key=lambda row: row["cost"])
    label = " ".join(f"{name}={text}" for name, text in cheapest["varied"].items())
    assert cheapest["cost"] < 0.1
    assert f"budget  {label}: the cheapest that fits and is predicted to end within 0.1, " in out
    assert out.count("\n0.1 buys  ") == 3
    assert "price   cluster=mi300x launch.nnodes=2: unknown; set cluster.price" in out
    assert "cost at 3.99 USD per GPU hour: Lambda, 8x H100 SXM, on 2026-09-20 (" in out
    _, out = invoke("compare", *args, "train.steps=500000000")
    assert "budget  no variant that fits is predicted to end within 0.1" in out
    _, out = invoke("compare", *args)
    assert "budget  " not in out
    assert out.count("\n0.1 buys  ") == 4
    assert out.count("cost at ") == 2


@pytest.mark.parametrize(("args", "part"), [
    (["--budget", "500"], "--budget: only valid with --simulate"),
    (["--simulate", "--budget", "0"], "--budget=0: expected a number from 0.01"),
    (["--simulate", "--budget", "much"], "--budget=much: expected a number from 0.01"),
])  # fmt: skip
def test_a_budget_is_money_of_a_simulation(args, part):
    code, out = invoke("compare", *args)
    assert (code, part in out) == (2, True)


def test_a_directory_that_is_not_empty_is_rejected(tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, out = invoke("compare", "--out", str(tmp_path))
    assert (code, "not an empty directory" in out) == (2, True)


@pytest.mark.parametrize(("option", "part"), [
    ("--steps=3", "from 4"), ("--steps=x", "from 4"), ("--steps=1e9", "from 4"),
    ("--rounds=2", "runs each variant once; set its length with --steps"),
])  # fmt: skip
def test_an_invalid_length_or_number_of_rounds_is_rejected(option, part):
    code, out = invoke("compare", option)
    assert (code, option.partition("=")[0] in out, part in out) == (2, True, True)


def test_settings_that_no_variant_supports_are_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out = invoke("compare", "data=text", "data.path=/no/such", "--steps", "4")
    assert (code, "data.path=/no/such: not found" in out) == (2, True)
    assert f"{len(STRATEGIES) - 1} more variants" in out


@pytest.mark.parametrize(("recipe", "noted"), [("", ()), ("cluster: h100\n", ()), ("", ("why",))])
def test_the_kernel_of_train_is_measured_and_notes_pass(tmp_path, monkeypatch, recipe, noted):
    ran, messages = [], list[str]()

    def run(seen, config, *_):
        ran.append(config.model.attention)
        seen.run_dir.mkdir(parents=True)
        write_lines(seen.run_dir, *(step_line(step) for step in range(1, 5)))

    monkeypatch.setattr(results, "run_briefly", run)
    monkeypatch.setattr(results, "note", lambda *lines: messages.extend(lines))
    monkeypatch.setattr("fsdpctl.resolve.auto_values.kernel_of", lambda *_, is_here: "math")
    # As for a family that computes attention with transformers.
    monkeypatch.setattr("fsdpctl.resolve.prepare.adapt_to_decoder", lambda config: (config, noted))
    (tmp_path / "r.yaml").write_text(f"{recipe}train.seed: 3\n")
    args = [*TINY, f"data.path={make_text(tmp_path)}", "strategy=no_shard,full_shard"]
    result = variants_of(args, str(tmp_path / "r.yaml"), simulates=False)
    results.measure(result, tmp_path, 4, is_kept=True)
    assert (ran, [each.result.status for each in result]) == (["math"] * 2, [OK] * 2)
    assert (messages.count("why"), any("h100" in line for line in messages)) == (
        len(noted),
        bool(recipe),
    )


def test_strategies_vary_too_if_engines_vary_and_no_strategy_is_set():
    result = variants_of(["engine=fsdpctl,fsdp2,ddp"], None, simulates=False)
    result, lines = drop_unsupported(result)
    pairs = {(e.composed.config.engine.name, e.composed.config.strategy.name) for e in result}
    assert {("fsdpctl", name) for name in STRATEGIES} < pairs
    assert {name for engine, name in pairs if engine == "ddp"} == {"no_shard"}
    assert ("fsdp2", "full_shard") in pairs
    (line,) = lines
    assert line.startswith("skipped: engine=fsdp2 does not support no_shard")
    assert all({"engine", "strategy"} == set(each.result.varied) for each in result)


def test_an_engine_without_any_of_the_strategies_is_an_error():
    result = variants_of(["engine=ddp", "strategy=full_shard,shard_grad_op"], None, simulates=False)
    with pytest.raises(UsageError, match="engine=ddp does not support full_shard, shard_grad_op"):
        drop_unsupported(result)
    alone = variants_of(["engine=ddp", "strategy=full_shard"], None, simulates=False)
    assert drop_unsupported(alone) == (alone, [])


def rows(folder: Path, *args: str, code: int = 0) -> list[dict[str, Any]]:
    typed = [*TINY, f"data.path={make_text(folder)}", *args]
    result = fsdpctl("compare", *typed, "--json", cwd=folder)
    assert result.returncode == code, result.stderr
    content: list[dict[str, Any]] = json.loads(result.stdout)
    return content


@pytest.mark.slow
def test_all_strategies_have_equal_losses_and_every_value_is_of_the_metrics(tmp_path):
    before = set(Path(tempfile.gettempdir()).glob("fsdpctl-*"))
    result = rows(tmp_path, "--steps", "8", "--out", "kept")
    assert {row["strategy"] for row in result} == set(STRATEGIES)
    assert len({row["final_loss"] for row in result}) == 1
    for row in result:
        assert row["status"] == "ok"
        file = tmp_path / "kept" / row["run_dir"] / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        timed = steps[2:]  # the first quarter is warm-up
        assert [line["step"] for line in steps] == list(range(1, 9))
        assert row["tokens_per_second"] == median(e["tokens_per_second"] for e in timed)
        assert row["step_seconds"] == median(line["seconds"] for line in timed)
        assert row["final_loss"] == steps[-1]["loss"]
    out_dir = tmp_path / "kept"
    assert json.loads((out_dir / "compare.json").read_text()) == result
    assert set(Path(tempfile.gettempdir()).glob("fsdpctl-*")) == before
    assert {file.name for file in out_dir.iterdir()} == {"compare.json", "compare.png", "runs"}


@pytest.mark.slow
def test_a_variant_that_cannot_run_does_not_stop_the_others(tmp_path):
    args = ["strategy=hybrid_shard", "strategy.dp_shard_size=3,2", "--steps", "4"]
    ran, refused = rows(tmp_path, *args, code=1)
    assert "must divide the 2 ranks" in str(refused["status"])
    assert (refused["tokens_per_second"], ran["status"]) == (None, "ok")


@pytest.mark.slow
def test_a_variant_that_fails_or_does_not_fit_has_a_row_with_the_reason(tmp_path):
    """One run ends with a non-finite step; the batch of another run exceeds the memory."""
    vary = ["optimizer.lr=1e-3,1e30", "strategy=full_shard", "--steps", "6"]
    ran, broken = rows(tmp_path, *vary, code=1)
    assert (ran["status"], broken["status"].startswith("failed: ")) == ("ok", True)
    assert "rejected, training stops" in broken["status"]
    held = ["strategy=full_shard", "activation_checkpointing=none", "prefetch=both"]
    args = [*TINY, f"data.path={make_text(tmp_path)}", *held]
    needs = [
        json.loads(invoke("estimate-memory", *args, f"train.micro_batch_size={n}", "--json")[1])
        for n in (1, 4)
    ]
    between = sum(each["peak_reserved_bytes"] for each in needs) / 2
    memory = (between + needs[0]["outside_bytes"][1]) / (1 << 30)
    sizes = ["train.micro_batch_size=1,4", f"cluster.memory={memory:.9f}", *held]
    small, large = rows(tmp_path, *sizes, "--steps", "4", code=1)
    assert (small["status"], large["status"].startswith("does not fit: ")) == ("ok", True)


@pytest.mark.slow
def test_an_interrupted_comparison_reports_its_results_and_leaves_no_rank(tmp_path):
    args = [*TINY, f"data.path={make_text(tmp_path)}", "strategy=no_shard,full_shard"]
    more = ["--steps", "60", "--out", "kept"]
    process = subprocess.Popen(
        command("compare", *args, *more), cwd=tmp_path, text=True, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=reset_signals,
    )  # fmt: skip
    file = tmp_path / "kept" / "runs" / "02" / "metrics.jsonl"
    wait_for(lambda: file.is_file() and '"step": 3,' in file.read_text())
    ranks = ranks_of(process)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert ranks
    assert not [each for each in ranks if each.is_running()]
    assert "tokens/s" in out
    content = json.loads((tmp_path / "kept" / "compare.json").read_text())
    assert {row["strategy"]: row["status"] for row in content} == {
        "no_shard": "ok", "full_shard": NOT_REACHED,
    }  # fmt: skip


@pytest.mark.slow
def test_recomputation_and_compilation_do_not_change_losses(tmp_path):
    args = ["activation_checkpointing=none,full,selective", "--steps", "6"]
    result = rows(tmp_path, "strategy=full_shard", *args)
    result.sort(key=lambda row: row["varied"]["activation_checkpointing"] != "none")
    plain, *others = result
    for row in others:
        assert row["final_loss"] == plain["final_loss"]
    (compiled,) = rows(tmp_path, "strategy=full_shard", "train.compile=true", "--steps", "6")
    assert compiled["final_loss"] == pytest.approx(plain["final_loss"], abs=1e-4)


@pytest.mark.slow
def test_bf16_follows_fp32_on_the_default_model(tmp_path):
    """Each of 20 losses differs by at most 0.02 nats."""
    losses = {}
    for precision in ("fp32", "bf16"):
        args = [f"precision={precision}", "train.steps=20", "train.sample_tokens=0"]
        result = fsdpctl("train", *args, f"train.run_dir={precision}", cwd=tmp_path, timeout=300)
        assert result.returncode == 0, result.stderr
        lines = map(json.loads, (tmp_path / precision / "metrics.jsonl").read_text().splitlines())
        losses[precision] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["fp32"]) == 20
    for full, half in zip(losses["fp32"], losses["bf16"], strict=True):
        assert half == pytest.approx(full, abs=0.02)
