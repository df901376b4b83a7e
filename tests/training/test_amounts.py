"""Sequence length, batch size and number of steps that follow from the data."""

import json

import pytest

from fsdpctl.config.compose import Composed, compose_config
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.data.packing import DocumentSet
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.resolve.auto_values import total_steps
from fsdpctl.resolve.prepare import Prepared, prepare
from fsdpctl.resolve.run_plan import make_run_plan
from fsdpctl.run.directory import inspect_run_dir
from tests.chats.families import write_lines, write_tokenizer

USUAL = 16


def opened(tmp_path, count: int, *args: str, ranks: int = 2) -> Prepared:
    return prepare(composed(tmp_path, count, *args, ranks=ranks))


def composed(tmp_path, count: int, *args: str, ranks: int = 2) -> Composed:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "chatml")
    rows = [
        {"messages": [{"role": "user", "content": f"{n} red"},
         {"role": "assistant", "content": "blue green " * 5}]}
        for n in range(count)
    ]  # fmt: skip
    file = write_lines(tmp_path / "a.jsonl", rows)
    fixed = [
        "data=chat", f"data.path={file}", f"data.tokenizer={tokenizer}", "data.val_fraction=0",
        "model=llama3_1b", "launch.device=cpu", f"launch.nproc_per_node={ranks}",
    ]  # fmt: skip
    return compose_config([*fixed, *args])


@pytest.mark.parametrize("packs", ["true", "false"])
@pytest.mark.parametrize("count", [50, 200, 2000])
def test_any_number_of_conversations_trains_for_enough_steps(tmp_path, count, packs):
    data = opened(tmp_path, count, f"data.packing={packs}")
    train = data.config.train
    assert train.steps is not None
    assert train.steps >= (50 if count > 50 else 37)
    assert 4 <= train.global_batch_size <= USUAL
    assert isinstance(data.data.train, DocumentSet)
    assert int(data.data.train.lengths.max()) - 1 <= train.seq_len <= 4096
    rows = data.data.train.samples(train.seq_len)
    passes = train.steps * train.global_batch_size / len(rows)
    assert 3 <= passes <= 3 + train.global_batch_size / len(rows)


def test_what_is_set_stays(tmp_path):
    data = opened(tmp_path, 40, "train.global_batch_size=8", "train.seq_len=512", "train.epochs=1")
    train = data.config.train
    assert (train.global_batch_size, train.seq_len) == (8, 512)
    assert data.config.train.steps == max(1, -(-len(data.data.train.samples(512)) // 8))
    assert opened(tmp_path, 40, "train.steps=7").config.train.steps == 7


def test_a_step_has_a_sample_for_each_rank_and_micro_batch(tmp_path):
    args = ["train.micro_batch_size=2", "accumulation.steps=3"]
    assert opened(tmp_path, 30, *args).config.train.global_batch_size == 12
    assert opened(tmp_path, 30, ranks=24).config.train.global_batch_size == 24


@pytest.mark.parametrize("count", [50, 200, 2000])
def test_a_run_on_conversations_is_the_same_on_other_ranks(tmp_path, count):
    result = {opened(tmp_path, count, ranks=ranks).config.train.run_dir for ranks in (1, 2, 3, 4)}
    assert len(result) == 1


def test_text_keeps_the_usual_numbers(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 5000)
    args = ["data=text", f"data.path={tmp_path / 'a.txt'}", "launch.device=cpu"]
    resolved = prepare(compose_config([*args, "launch.nproc_per_node=2"]))
    assert (resolved.config.train.steps, resolved.config.train.global_batch_size) == (500, USUAL)
    many = prepare(compose_config([*args, "launch.nproc_per_node=20"])).config.train
    assert many.global_batch_size == 20


def composed_text(tmp_path, count: int, *args: str, ranks: int = 2) -> Composed:
    """Return a run on text for a model whose tokenizer has longer tokens than bytes."""
    folder = write_tokenizer(tmp_path / "model", "chatml")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    (tmp_path / "a.txt").write_text("red blue green " * count)
    fixed = [
        "data=text", f"data.path={tmp_path / 'a.txt'}", "launch.device=cpu", "model=hf",
        f"model.path={folder}", "model.init=random", f"launch.nproc_per_node={ranks}",
    ]  # fmt: skip
    return compose_config([*fixed, *args])


@pytest.mark.parametrize(("make", "count", "args"), [
    (composed, 50, ["train.epochs=2"]), (composed, 300, ["train.epochs=1", "data.packing=false"]),
    (composed, 300, ["train.tokens=40000"]), (composed_text, 3000, ["train.epochs=1"]),
    (composed_text, 9000, ["train.epochs=0.5", "train.seq_len=64"]),
])  # fmt: skip
def test_an_estimate_counts_the_samples_and_steps_of_the_run(tmp_path, make, count, args):
    config = make(tmp_path, count, *args)
    resolved, estimator = prepare(config).config.train, Estimator()
    placed = estimator.prepare(config).config
    known = placed.train.seq_len, placed.train.global_batch_size
    assert known == (resolved.seq_len, resolved.global_batch_size)
    assert total_steps(placed, estimator.data_of(placed)) == resolved.steps
    assert len(estimator._data) == 1  # read once


@pytest.mark.parametrize("to", [1, 2, 3])
@pytest.mark.parametrize(("make", "count", "args", "ranks"), [
    (composed_text, 9000, ["train.steps=6", "train.steps=12", "data.val_fraction=0"], 1),
    (composed, 300, ["train.epochs=0.5", "train.epochs=4"], 2),
    (composed_text, 9000, ["train.steps=500", "train.steps=40", "train.seq_len=16"], 24),
])  # fmt: skip
def test_a_longer_run_on_other_ranks_has_the_settings_it_was_begun_with(
    tmp_path, monkeypatch, make, count, args, ranks, to
):
    monkeypatch.chdir(tmp_path)
    first, longer, *more = args
    begun = make_run_plan(prepare(make(tmp_path, count, first, *more, ranks=ranks)).config).config
    run_dir = tmp_path / str(begun.train.run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(config_to_yaml(begun))
    (run_dir / "overrides.txt").write_text(first)
    wanted = make(tmp_path, count, longer, *more, ranks=to)
    plan = make_run_plan(inspect_run_dir(prepare(wanted).config, "auto").config)
    names = ("train.run_dir", "train.seq_len", "train.global_batch_size",
            "lr_scheduler.warmup_steps", "optimizer.lr")  # fmt: skip
    assert [plan.config.value(key) for key in names] == [begun.value(key) for key in names]
    assert plan.config.train.steps != begun.train.steps
    assert plan.batches.micro_batch_size == -(-begun.train.global_batch_size // to)
    fresh = prepare(wanted, resume="never").config
    assert any(fresh.value(key) != begun.value(key) for key in names)
    (run_dir / "overrides.txt").write_text("\n".join(f"{key}={begun.value(key)}" for key in names))
    with pytest.raises(UsageError, match="contains a run with a different configuration"):
        inspect_run_dir(prepare(wanted).config, "auto")
