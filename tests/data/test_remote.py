"""Token files in an object store, with its faults; the store is fsspec's, in memory."""

import random
import time
from collections import Counter
from datetime import UTC, datetime

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from fsdpctl.config.data import DataConfig
from fsdpctl.data import remote_tokens
from fsdpctl.data.batches import Batches
from fsdpctl.data.find_data import find_data
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import IGNORE_INDEX
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io import stores
from fsdpctl.plan.batch_plan import plan_batches
from tests.data.test_token_formats import TOKENS, write_datatrove, write_llm_c


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Return a directory, and a function that copies it into the store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(stores, "STORES", ("memory",))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        write_llm_c(folder / f"train_{number}.bin", TOKENS[number * 300 : number * 300 + 300])

    def upload():
        store = MemoryFileSystem()
        for file in folder.iterdir():
            store.pipe_file(f"/bucket/{file.name}", file.read_bytes())

    return folder, upload


def batches(path, **kwargs):
    data = open_data(DataConfig(name="tokens", path=path, val_fraction=0, **kwargs))
    return Batches(data.train.samples(8), plan_batches(6, 2), 0, 60_000)


def same(here, there, steps=30):
    for step in range(steps):
        for rank in range(2):
            samples, other = (each.training(6 * step, rank, 0) for each in (here, there))
            assert samples.tokens.tolist() == other.tokens.tolist()
            assert samples.targets.tolist() == other.targets.tolist()
    return True


def test_samples_are_those_of_the_files_and_each_is_fetched_once(bucket, monkeypatch):
    folder, upload = bucket
    upload()
    requests: Counter[tuple[str, int, int]] = Counter()
    plain = MemoryFileSystem.cat_file

    def counted(self, path, start=None, end=None, **kwargs):
        requests[path, start, end] += 1
        return plain(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    there = batches("memory://bucket")
    requests.clear()
    assert same(batches(str(folder)), there, steps=11)  # and 7 ahead: within an epoch
    assert max(requests.values()) == 1
    assert there.samples.is_remote
    assert batches("memory://bucket/*_[12].bin").num_samples == 599 // 8


def test_a_store_that_fails_at_random_changes_no_sample(bucket, monkeypatch):
    folder, upload = bucket
    upload()
    rng, plain = random.Random(0), MemoryFileSystem.cat_file

    def failing(self, path, start=None, end=None, **kwargs):
        if rng.random() < 0.3:
            raise rng.choice([OSError("reset"), TimeoutError(), ValueError("500")])
        return plain(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(stores, "_ATTEMPTS", 40)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", failing)
    assert same(batches(str(folder)), batches("memory://bucket"))


def test_a_file_of_the_same_size_that_replaces_another_is_named(bucket):
    folder, upload = bucket
    upload()
    there = batches("memory://bucket").samples
    there.fetch(range(8))
    assert len([there[number] for number in range(8)]) == 8
    write_llm_c(folder / "train_0.bin", TOKENS[500:800])
    upload()
    with pytest.raises(UsageError, match=r"^/bucket/train_0\.bin: changed since the run started"):
        there[8]
    there.fetch([9])
    with pytest.raises(UsageError, match=r"train_0\.bin: changed"):
        there[9]


def test_samples_that_are_fetched_together_share_a_question_about_their_file(bucket, monkeypatch):
    _, upload = bucket
    upload()
    requests, plain = Counter[str](), MemoryFileSystem.info

    def slow(self, path, **kwargs):
        requests[path] += 1
        time.sleep(0.02)
        return plain(self, path, **kwargs)

    there = batches("memory://bucket").samples
    monkeypatch.setattr(MemoryFileSystem, "info", slow)
    there.fetch(range(36))
    assert len([there[number] for number in range(36)]) == 36
    assert 1 <= requests["/bucket/train_0.bin"] < 18


@pytest.mark.parametrize(("listed", "single"), [
    ({"ETag": '"a"', "LastModified": 1}, {"ETag": '"a"', "LastModified": 2}),  # s3fs
    ({"etag": "a", "updated": "x"}, {"etag": '"a"', "updated": "y"}),
    ({"created": 5.25}, {"created": datetime.fromtimestamp(5.25, tz=UTC)}),
])  # fmt: skip
def test_a_listing_and_an_answer_about_the_same_file_have_the_same_version(listed, single):
    assert remote_tokens._version(listed) == remote_tokens._version(single)
    changed = {name: f"{value}+" for name, value in single.items()}
    assert remote_tokens._version(changed) != remote_tokens._version(listed)


def test_flags_of_the_loss_are_fetched_with_their_tokens(bucket):
    folder, upload = bucket
    for file in folder.iterdir():
        file.unlink()
    for name in "ab":
        write_datatrove(folder / f"{name}.ds")
        (np.arange(len(TOKENS)) % 3 > 0).tofile(folder / f"{name}.ds.loss")
    upload()
    for packing in (False, True):
        here, there = (batches(x, packing=packing) for x in (str(folder), "memory://bucket"))
        assert same(here, there)
        assert (here.samples[0].targets == IGNORE_INDEX).any()
    cached = sum(file.stat().st_blocks * 512 for file in folder.parent.rglob("cache/**/*.loss"))
    assert cached <= 2 * 4096
    MemoryFileSystem().pipe_file("/bucket/b.ds.loss", bytes(len(TOKENS)))
    with pytest.raises(UsageError, match=r"b\.ds\.loss: changed since the run started"):
        there.validation(30, 0, 0)


def test_documents_and_damage_in_a_store_are_known(bucket, monkeypatch):
    folder, upload = bucket
    for file in folder.iterdir():
        file.unlink()
    write_datatrove(folder / "a.ds")
    upload()
    there = batches("memory://bucket", packing=True)
    assert same(batches(str(folder), packing=True), there)
    MemoryFileSystem().pipe_file("/bucket/a.ds", TOKENS[:30].astype("<u2").tobytes())
    with pytest.raises(FsdpctlError, match=r"a\.ds: truncated at byte"):
        there.validation(9, 0, 0)
    with pytest.raises(UsageError, match=r"a\.ds: expected 999"):
        batches("memory://bucket")
    MemoryFileSystem().rm("/bucket/a.ds")
    with pytest.raises(FsdpctlError, match=r"a\.ds: FileNotFoundError"):
        there.validation(3, 0, 0)
    with pytest.raises(UsageError, match="no token files"):
        batches("memory://bucket")


def test_files_of_several_directories_are_all_read_and_none_leads_out(bucket, tmp_path):
    folder, _ = bucket
    store = MemoryFileSystem()
    for name in ("s_00/a.bin", "s_01/a.bin", "s/sub/a.bin"):
        store.pipe_file(f"/deep/{name}", (folder / "train_1.bin").read_bytes())
    assert batches("memory://deep").num_samples == 899 // 8
    store.pipe_file("/deep/s/../../x.json", b"{}")
    with pytest.raises(UsageError, match="leads out of its directory"):
        batches("memory://deep")
    assert not list(tmp_path.rglob("x.json"))


def test_a_file_of_the_same_size_and_another_time_is_another_file(bucket):
    folder, upload = bucket
    upload()
    before = batches("memory://bucket").samples.stream.fingerprint
    write_llm_c(folder / "train_1.bin", TOKENS[:300])
    upload()
    assert batches("memory://bucket").samples.stream.fingerprint != before


def test_other_data_and_unknown_stores_are_refused():
    with pytest.raises(UsageError, match="only data=tokens reads from object stores"):
        find_data("s3://bucket/text")
    with pytest.raises(UsageError, match=r"^data\.path=nostore://x: not supported"):
        batches("nostore://x")


def test_the_window_of_samples_that_wait_is_limited(bucket, monkeypatch):
    _, upload = bucket
    upload()
    monkeypatch.setattr(remote_tokens, "_MAX_PREFETCHED", 5)
    rows = batches("memory://bucket").samples
    rows.fetch(range(30))
    assert max(len(each.prefetched) for each in rows.stream.tokens.shards) == 5
    assert np.concatenate([rows[n].tokens for n in range(30)]).tolist() == TOKENS[:240].tolist()
