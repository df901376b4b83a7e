"""The length, the size and the number of steps that follow from the data."""

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.data.packing import DocumentSet
from fsdpctl.resolve.open import Opened, open_run
from tests.chats.families import write_lines, write_tokenizer

USUAL = 16


def opened(tmp_path, count: int, *words: str, ranks: int = 2) -> Opened:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "chatml")
    rows = [
        {"messages": [
            {"role": "user", "content": f"{n} red"},
            {"role": "assistant", "content": "blue green " * 5},
        ]}
        for n in range(count)
    ]  # fmt: skip
    file = write_lines(tmp_path / "a.jsonl", rows)
    fixed = [
        "data=chat", f"data.path={file}", f"data.tokenizer={tokenizer}", "data.val_fraction=0",
        "model=llama3_1b", "launch.device=cpu", f"launch.nproc_per_node={ranks}",
    ]  # fmt: skip
    return open_run(compose_config([*fixed, *words]))


@pytest.mark.parametrize("packs", ["true", "false"])
@pytest.mark.parametrize("count", [50, 200, 2000])
def test_any_number_of_conversations_trains_for_enough_steps(tmp_path, count, packs):
    found = opened(tmp_path, count, f"data.packing={packs}")
    train = found.config.train
    assert train.steps is not None
    assert train.steps >= (50 if count > 50 else 37)
    assert 4 <= train.global_batch_size <= USUAL
    assert isinstance(found.data.train, DocumentSet)
    longest = int(found.data.train.lengths.max())
    assert longest - 1 <= train.seq_len <= 4096
    rows = found.data.train.rows(train.seq_len)
    passes = train.steps * train.global_batch_size / len(rows)
    assert 3 <= passes <= 3 + train.global_batch_size / len(rows)


def test_what_is_set_stays(tmp_path):
    words = ["train.global_batch_size=8", "train.seq_len=512", "train.epochs=1"]
    found = opened(tmp_path, 40, *words)
    train = found.config.train
    assert (train.global_batch_size, train.seq_len) == (8, 512)
    rows = len(found.data.train.rows(512))
    assert found.config.train.steps == max(1, -(-rows // 8))
    assert opened(tmp_path, 40, "train.steps=7").config.train.steps == 7


def test_a_step_has_a_sample_for_each_rank_and_micro_batch(tmp_path):
    words = ["train.micro_batch_size=2", "accumulation.steps=3"]
    assert opened(tmp_path, 30, *words).config.train.global_batch_size == 12
    many = opened(tmp_path, 30, ranks=24).config.train.global_batch_size
    assert many == 24


@pytest.mark.parametrize("count", [50, 200, 2000])
def test_a_run_on_conversations_is_the_same_on_other_ranks(tmp_path, count):
    found = {opened(tmp_path, count, ranks=ranks).config.train.run_dir for ranks in (1, 2, 3, 4)}
    assert len(found) == 1


def test_text_keeps_the_usual_numbers(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 5000)
    words = ["data=text", f"data.path={tmp_path / 'a.txt'}", "launch.device=cpu"]
    found = open_run(compose_config([*words, "launch.nproc_per_node=2"]))
    assert (found.config.train.steps, found.config.train.global_batch_size) == (1000, USUAL)
    many = open_run(compose_config([*words, "launch.nproc_per_node=20"])).config.train
    assert many.global_batch_size == 20
