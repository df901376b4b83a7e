"""The best variant as a recipe."""

from dataclasses import replace

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import KEYS
from fsdpctl.errors import UsageError
from fsdpctl.tools.compare.vary import check_recipe_file, recipe_words, variants, write_recipe
from tests.cli.run import invoke


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        (["strategy=no_shard,full_shard"], None),
        (["strategy=hybrid_shard", "strategy.dp_shard_size=1,2"], None),
        (["strategy=shard_optimizer,no_shard", "strategy.owner_map=balanced"], None),
        (["reshard_after_forward=false", "optimizer.lr=1e-3,auto"], None),
        (["train.global_batch_tokens=4096", "prefetch=none,both"], None),
        (["model=llama3_1b,qwen3_4b", "train.seq_len=512", "precision=bf16"], None),
        (["optimizer=sgd,adamw", "launch.nproc_per_node=4", "lr_scheduler.warmup_ratio=0.1"], None),
        (["activation_checkpointing=none,full"], "shakespeare"),
        (["model=gpt2", "train.micro_batch_size=1,2", "data.val_fraction=0"], "shakespeare"),
        (["data=text", "data.path=a b:c #d.txt", "train.compile=false,true"], None),
    ],
)
def test_a_written_recipe_is_the_variant(tmp_path, words, recipe):
    for number, each in enumerate(variants(words, recipe, steps=7)):
        file = tmp_path / f"{number}.yaml"
        write_recipe(file, each, ["the best\nof all"], recipe=recipe)
        assert file.read_text().startswith("# the best of all\n")
        again = compose_config([], str(file)).config
        asked = compose_config(each.words, recipe).config
        assert again.train.steps == asked.train.steps
        measured = each.composed.config
        train = replace(again.train, steps=7, epochs=None, tokens=None)
        assert replace(again, train=train) == measured


def test_a_recipe_has_only_settings_that_differ_from_the_defaults():
    (first, _) = variants(["strategy=no_shard,full_shard"], None, steps=4)
    assert recipe_words(first) == {"strategy": "no_shard", "engine": "fsdpctl"}


def test_settings_that_are_executed_are_not_written():
    (only,) = variants(["strategy=no_shard", "checkpoint.after_save=rm"], None, steps=4)
    assert not any(KEYS[name].is_executed for name in recipe_words(only) if name in KEYS)


def test_an_existing_file_is_rejected_before_anything_runs(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("strategy: no_shard\n")
    code, said = invoke("compare", "--write-recipe", str(file))
    assert (code, "already exists" in said) == (2, True)
    with pytest.raises(UsageError, match="not writable"):
        check_recipe_file(tmp_path / "nowhere" / "x.yaml")
    (each,) = variants(["strategy=full_shard"], None, steps=4)
    with pytest.raises(UsageError, match="exists"):
        write_recipe(file, each, [], recipe=None)
    assert file.read_text() == "strategy: no_shard\n"
