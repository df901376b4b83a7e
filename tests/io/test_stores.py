"""URLs that may be opened: settings may come from other users."""

import pytest

from fsdpctl.errors import UsageError
from fsdpctl.io.stores import is_remote, open_store

REFUSED = [
    "reference://::file://refs.json", "http://127.0.0.1:9/t.bin", "HTTP://127.0.0.1:9/t.bin",
    "https://host/t.bin", "ftp://host/t.bin", "memory://bucket", "zip://a.txt::file://x.zip",
    "local:///etc/passwd", "dir::s3://bucket/x", "filecache::s3://bucket/x", "simplecache::x",
    "github://org:repo/x", "s3://bucket/x::file://y", "S3://bucket/x", "file::x", "data://,x",
    "sftp://host/t.bin", "webhdfs://host/x", "abfs://x/y",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_other_protocols_than_those_of_the_rule_are_never_opened(monkeypatch, url):
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: pytest.fail(f"opened {url}"))
    with pytest.raises(UsageError, match=r"^data.path=.*: (not supported|a URL with)"):
        open_store(url, f"data.path={url}")
    with pytest.raises(UsageError, match="not supported|a URL with"):
        is_remote(url)


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x-?.bin", "file:///data/t.bin"])
def test_stores_are_told_from_paths(url):
    assert is_remote(url)


@pytest.mark.parametrize("path", ["data/t.bin", "/x/t.bin", "hf://org/name@main", "a:b", "x=y", ""])
def test_paths_and_names_on_the_hub_are_in_no_store(path):
    assert not is_remote(path)
    with pytest.raises(UsageError, match="^x: not in an object store"):
        open_store(path, "x")


def test_a_path_that_exists_is_one_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir::x").write_text("text")
    assert not is_remote("dir::x")


@pytest.mark.parametrize("url", ["s3://me:S3CR3T@bucket/x", "s3://S3CR3T@bucket/x",
                                 "gs://bucket/x?X-Goog-Signature=S3CR3T"])  # fmt: skip
def test_the_refusal_of_a_secret_quotes_nothing(url):
    for setting in ("", f"--resume {url}", f"data.path={url}"):
        with pytest.raises(UsageError) as caught:
            is_remote(url, setting)
        assert "S3CR3T" not in str(caught.value)
