"""Mixtures: their shares, their order, and how they resume."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpctl.config.data import DataConfig
from fsdpctl.config.data_sources import absolute_paths, sources_in
from fsdpctl.data.batches import Batches
from fsdpctl.data.mixture import PERIOD, MixedSource, Mixture, ShareSchedule
from fsdpctl.data.open_data import open_data
from fsdpctl.data.streams import TokenStream
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch_plan import plan_batches

SHARES = (0.4, 0.3, 0.2, 0.0995, 0.0005)
SIZES = (5000, 70, 333, 40, 1000)


def mixture():
    """Return five sources; a token encodes its source and its sample of 4 tokens."""
    numbers = [np.arange(size + 1, dtype=np.uint32) * 5 + n for n, size in enumerate(SIZES)]
    streams = [TokenStream(np.repeat(each, 4)[:-3], None) for each in numbers]
    parts = zip("abcde", SHARES, streams, strict=True)
    return Mixture(tuple(MixedSource(*each) for each in parts))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0.001, 1), min_size=2, max_size=6),
    st.integers(0, 9000),
    st.integers(1, 5000),
)
def test_every_position_has_one_source_however_it_is_asked(shares, start, count):
    schedule = ShareSchedule(shares)
    whole = schedule.sources(0, start + count)
    assert schedule.sources(start, count).tolist() == whole[start:].tolist()
    seen = np.bincount(whole[:start], minlength=len(shares))
    assert seen.tolist() == schedule.counts(start).tolist()


def test_every_window_has_the_shares_within_one_sample():
    result = ShareSchedule(SHARES).sources(0, 3 * PERIOD)
    seen = np.cumsum(result[:, None] == np.arange(5), axis=0)
    windows = seen[PERIOD:] - seen[:-PERIOD]
    assert np.abs(windows - PERIOD * np.array(SHARES)).max() < 1
    short = seen[64:] - seen[:-64]
    assert np.abs(short - 64 * np.array(SHARES)).max() < 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_see_the_same_samples_and_each_source_in_epochs(world_size):
    rows = mixture().samples(4)
    plan = plan_batches(12, world_size, micro_batch_size=2)
    batches = Batches(rows, plan, 3, 30_000)
    seen = []
    for step in range(100):
        for rank in range(world_size):
            for micro in range(plan.num_micro_batches):
                batch = batches.training(12 * step, rank, micro)
                seen += [int(t[0]) for t, y in zip(batch.tokens, batch.targets, strict=True) if
                         (y >= 0).all()]  # fmt: skip
    assert sorted(seen) == sorted(
        int(rows[int(n)].tokens[0]) for step in range(100) for n in rows.order(12 * step, 12, 3)
    )
    counts = rows.schedule.counts(1200)
    for source, size in enumerate(SIZES):
        of_source = np.bincount([each // 5 for each in seen if each % 5 == source], minlength=size)
        assert of_source.sum() == counts[source]
        assert of_source.max() - of_source.min() <= 1  # every epoch uses all samples
    assert rows.epochs(1200)["b"] == counts[1] / 70
    messages = [line for at in range(0, 300, 10) for line in rows.new_epochs(at, at + 10)]
    assert messages == ["b: epoch 2 begins"]


def test_sources_are_named_in_the_path(tmp_path):
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 200)
    web, code = tmp_path / "web.txt", tmp_path / "code.txt"
    data = open_data(DataConfig(name="text", path=f"{web}:3,mine={code}:1", val_fraction=0.1))
    assert isinstance(data.train, Mixture)
    named = [(each.name, each.share) for each in data.train.sources]
    assert named == [("web", 0.75), ("mine", 0.25)]
    assert data.description == "web (75.0%), mine (25.0%)"
    assert isinstance(data.val, Mixture)
    by_size = open_data(DataConfig(name="text", path=f"{web},{code}", val_fraction=0))
    assert by_size.description == "web (44.4%), code (55.6%)"
    other = open_data(DataConfig(name="text", path=f"{web}:0.7,{code}:0.5", val_fraction=0))
    assert other.fingerprint != data.fingerprint
    assert other.notes[0] == "shares 0.7, 0.5 add up to 1.2 and are scaled to a sum of 1"
    assert not any("scaled" in note for note in data.notes)
    for shares in ("0.7,0.2,0.1", "1,1,1", "0.1,0.2,0.3"):
        text = ",".join(f"{name}:{s}" for name, s in zip("abc", shares.split(","), strict=True))
        once = absolute_paths(text)
        assert absolute_paths(once) == once
    with pytest.raises(UsageError, match=r"web: its share rounds to 0 of 4,096 samples"):
        open_data(DataConfig(name="text", path=f"{web}:0.0001,{code}:1"))
    with pytest.raises(UsageError, match=r"data\.val_path=.*not found"):
        open_data(DataConfig(name="text", path=f"{web},{code}", val_path=f"{tmp_path}/v.txt"))


def test_sources_are_called_after_their_files():
    names = {
        "a/web.tar.gz": "web", "a/web/": "web", "web/*.bin": "web", "b-*.bin": "b",
        "s3://bucket/x/train_*.bin": "train", "*": "*", "/data/.hidden/*": "data",
        "mine=x.bin": "mine",
    }  # fmt: skip
    for path, name in names.items():
        assert sources_in(path)[0].name == name


def test_a_path_with_an_equals_sign_is_a_path_if_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("lang=en/a.txt", "lang=fr/b.txt", "x/c.txt", "day=1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some text " * 99)
    paths = {
        "lang=en/*.txt": ["lang=en/*.txt"], "lang=*/*.txt": ["lang=*/*.txt"],
        "lang=en/a.txt:0.5,lang=fr/b.txt:0.5": ["lang=en/a.txt", "lang=fr/b.txt"],
        "lang=en/*.txt:1,lang=fr/:3": ["lang=en/*.txt", "lang=fr/"],
        "[day=?.txt, lang=fr]": ["day=?.txt", "lang=fr"],
    }  # fmt: skip
    for text, expected in paths.items():
        result = sources_in(text)
        assert [(each.path, each.given_name) for each in result] == [(x, None) for x in expected]
    assert [each.share for each in sources_in("lang=en/*.txt:1,lang=fr/:3")] == [0.25, 0.75]
    for text in ("mine=x/c.txt", "mine=x/*.txt", "mine=lang=en/*.txt"):
        one = sources_in(f"{text}:0.5,other.txt:0.5")[0]
        assert (one.given_name, one.path) == ("mine", text.removeprefix("mine="))
    data = open_data(DataConfig("text", "lang=en/a.txt:0.5,lang=fr/b.txt:0.5", val_fraction=0))
    assert data.description == "a (50.0%), b (50.0%)"


@pytest.mark.parametrize(("text", "arg"), [
    ("a.txt:1,b.txt", "b.txt has no share"), ("a.txt:0,b.txt:1", "expected a share above 0"),
    ("a.txt:nan,b.txt:1", "expected a share above 0"), ("[]", "expected at least one file"),
])  # fmt: skip
def test_a_mistake_in_a_mixture_is_named(text, arg):
    with pytest.raises(UsageError, match=arg):
        sources_in(text)


def test_sources_of_one_name_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("some text " * 99)
    path = f"{tmp_path}/a/x.txt:1,{tmp_path}/b/x.txt:1"
    with pytest.raises(UsageError, match="two sources are called x"):
        open_data(DataConfig(name="text", path=path))
