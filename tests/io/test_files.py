"""Opening of untrusted files, and writing of whole files."""

import errno
import os

import pytest

from fsdpctl.errors import CheckpointError, UsageError
from fsdpctl.io.files import checked_name, open_atomic, open_regular, read_regular, write_atomic


@pytest.mark.parametrize("name", [
    "../x.json", "/etc/x.json", "a/b.json", "..", ".", "", ".hidden.json", "a\0b.json", "a b.json",
    "x" * 300 + ".json", "-rf.json", "x.JSON\n", "x.py", None, 3, "..json/..", "a\\b.json",
])  # fmt: skip
def test_only_plain_names_that_match_are_accepted(name):
    with pytest.raises(CheckpointError, match="where: .* is not a valid file name here"):
        checked_name(name, r".*\.json", "where", CheckpointError)


def test_a_plain_name_is_returned():
    assert checked_name("tokenizer_config.json", r".*\.json", "x", UsageError)


def test_opening_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(UsageError, match="No such file"):
        open_regular(tmp_path / "missing")


def test_links_are_followed_within_the_directory_only(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("s")
    (folder / "there").write_text("t")
    (folder / "inside").symlink_to("there")
    (folder / "outside").symlink_to("../secret")
    (tmp_path / "way").symlink_to(folder)
    assert read_regular(folder / "inside") == read_regular(tmp_path / "way" / "inside") == b"t"
    with pytest.raises(UsageError, match="outside its directory"):
        read_regular(folder / "outside")
    assert read_regular(folder / "outside", follow_links=True) == b"s"


def test_links_of_the_hub_cache_are_followed(tmp_path):
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1f"
    for each in (blobs, snapshot):
        each.mkdir(parents=True)
    (blobs / "9e").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/9e")
    assert read_regular(snapshot / "config.json") == b"{}"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").symlink_to(blobs / "9e")
    with pytest.raises(UsageError, match="outside its directory"):
        read_regular(tmp_path / "other" / "config.json")


def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="words") as caught, open_atomic(tmp_path / "words"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "words")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x"
    write_atomic(file, "old ü")

    def fail():
        with open_atomic(file, durable=True) as new:
            new.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert file.read_text("utf-8") == "old ü"
    write_atomic(file, b"new", durable=True)
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"new", [file])
