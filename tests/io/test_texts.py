"""Names and values from other users: how they are printed, and which are rejected."""

import time

import pytest
import yaml

from fsdpctl.config.schema import KEYS
from fsdpctl.config.serialize import settings_to_yaml
from fsdpctl.errors import UsageError
from fsdpctl.io.texts import escaped, hub_name, one_line, printable, refuse_credentials

STEERING = ["\x1b]0;TITLE\x07", "\x9b31m", "\x85", "\u2028", "\u2029", "\u202e", "\u2066", "\u061c",
            "\u200f", "\r", "\x08", "\x7f", "\ud800"]  # fmt: skip
SECRETS = [
    "ftp://user:S3CR3T@host/t.bin", "s3://AKIA:ab/S3CR3T@bucket/x", "https://:S3CR3T@host",
    "https://host/x?X-Amz-Signature=S3CR3T", "https://host/x?a=1&access_token=S3CR3T",
    "https://host/x?sig=S3CR3T&se=1", "https://host/x#key=S3CR3T", "HTTPS://u:S3CR3T@host",
    "https://S3CR3T@host/x", "https://host/x?code=S3CR3T",
]  # fmt: skip
PLAIN = [
    "s3://bucket/part-?.bin:0.5,b=s3://bucket/x:1", "hf://org/name@main:config/train", "a@b.c",
    "gs://bucket/a=b/x-*.bin", "/data/x@y", "https://host:8080/x", "C:/x", "name=s3://b/x-?:0.5",
]  # fmt: skip


@pytest.mark.parametrize("text", STEERING)
def test_control_characters_are_replaced(text):
    shown = printable(f"a{text}b")
    assert "\N{REPLACEMENT CHARACTER}" in shown
    assert not set(shown) & (set(text) - set("]0;TITLE31m"))


def test_a_name_is_one_line_and_other_text_is_unchanged():
    assert one_line("a\nb\tc") == "a\N{REPLACEMENT CHARACTER}b\tc"
    assert printable("a\nb, žluťoučký 漢字 🙂") == "a\nb, žluťoučký 漢字 🙂"


@pytest.mark.parametrize("url", SECRETS)
def test_a_url_with_a_secret_is_refused_everywhere(url):
    with pytest.raises(UsageError, match="^data.path: ") as caught:
        refuse_credentials(url, "data.path")
    assert "S3CR3T" not in str(caught.value)
    for key in ("data.path", "data.val_path", "checkpoint.remote"):
        with pytest.raises(UsageError, match=f"^{key}: "):
            KEYS[key].parse(f"x {url}")


@pytest.mark.parametrize("url", SECRETS[:-1])  # code= may be of anything
def test_a_secret_in_a_url_is_never_printed(url):
    assert "S3CR3T" not in printable(f"data.path={url}: not found")


@pytest.mark.parametrize("text", PLAIN)
def test_other_urls_and_paths_are_accepted_and_printed_as_they_are(text):
    refuse_credentials(text, "data.path")
    assert printable(text) == text


@pytest.mark.slow
def test_the_search_takes_no_time():
    began = time.process_time()
    for text in ("://" * 30_000, "://" + "?" * 60_000, "://a:" + "b" * 60_000, ":/a" * 30_000):
        printable(text)
        refuse_credentials(text, "x")
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "text", ["a\ntrain.steps: 7", "\x9b31m", "a\u2028b\x85", "\u202e", "x\\y\x07"]
)
def test_a_value_stays_one_in_yaml(text):
    written = settings_to_yaml({"data.path": text})
    assert written.count("\n") == 1
    assert written.rstrip("\n").isprintable()
    assert (yaml.safe_load(written), escaped("a\n")) == ({"data.path": text}, "a\n")


def test_a_directory_in_the_cache_has_a_name_and_a_commit_on_the_hub():
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = f"/home/me/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}"
    assert hub_name(path) == ("Qwen/Qwen3-0.6B", commit)
    assert hub_name(f"{path}/x") is None
    assert hub_name("/home/me/model") is None
