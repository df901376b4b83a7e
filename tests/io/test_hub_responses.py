"""Malicious responses of the Hub, and its cache: no other host or file is accessed."""

import gzip
import json
import os
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from fsdpctl.config.hub import local_model
from fsdpctl.data.find_data import find_data
from fsdpctl.errors import UsageError
from fsdpctl.io import hub_repository, hub_responses
from fsdpctl.io.files import open_regular
from fsdpctl.io.hub_repository import Repository
from tests.hub_server import SHA, TOKEN, Hub, serving

MODEL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1 << 17)}
DATA = {"README.md": b"# Texts", "a.jsonl": b'{"text": "x"}\n', "b.jsonl": b'{"text": "y"}\n'}
FINDERS: dict[str, Callable[[str], object]] = {"o/m": local_model, "hf://o/d": find_data}
OTHER, OUT = "http://localhost:9/x", "../../../evil"  # not 127.0.0.1; not below the cache


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with serving(Hub({"o/m": MODEL}, {"o/d": DATA}), tmp_path / "in", monkeypatch) as result:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield result


def refusals():
    """Return the errors about a model and about data, and check that no other file is written."""
    results = []
    for path, find in FINDERS.items():
        with pytest.raises(UsageError) as caught:
            find(path)
        results.append(str(caught.value))
    assert {*os.listdir("..")} == {"in"}
    assert {*os.listdir()} <= {"hub"}
    assert not re.search("\n|OFFLINE|reached", "".join(results))
    return results


@pytest.mark.parametrize(("request_", "name", "value", "args"), [
    ("GET .*/revision/", "sha", OUT, r"Expected `str` matching .* at `\$.sha`"),
    ("GET .*/revision/", "sha", None, r"got `null` - at `\$.sha`"),
    ("GET .*/revision/", "sha", SHA[1:], "Expected `str` matching"),
    ("GET .*/tree/", "path", OUT, "names a file '../../../evil', outside its repository"),
    ("GET .*/tree/", "path", "/etc/passwd", "outside its repository"),
    ("GET .*/tree/", "path", ["a"], r"got `array` - at `\$\[0\].path`"),
    ("GET .*/tree/", "size", -1, "Expected `int` >= 0"),
    ("GET .*/tree/", "lfs", {"oid": OUT, "size": 1, "pointerSize": 1}, "matching"),
    ("GET .*/tree/", "Link", f'<{OTHER}>; rel="next"', "refers to another host, localhost"),
    ("GET .*/tree/", "Content-Encoding", "br", "compresses by br"),
    ("GET .*/tree/", "Retry-After", "86400", "with Retry-After 86400 s"),
    ("HEAD", "X-Repo-Commit", OUT, "names a commit '../../../evil'"),
    ("HEAD", "ETag", f'"{OUT}"', "has the ETag .*; expected"),
    ("HEAD", "X-Linked-Etag", "..", "has the ETag '..'; expected"),
    ("HEAD", "X-Xet-Refresh-Route", OTHER, "refers to another host, localhost"),
])  # fmt: skip
def test_what_a_server_names_is_checked_before_it_is_used(hub, request_, name, value, args):
    def change(what, headers, body):
        if re.match(request_, what) and name.islower():
            content = json.loads(body)
            (content[0] if isinstance(content, list) else content)[name] = value
            return json.dumps(content).encode()
        headers.update({name: value} if re.match(request_, what) else {})
        return body

    hub.change = change
    for text in refusals():
        assert re.search(rf": 127\.0\.0\.1:\d+ .*{args}", text), text


@pytest.mark.parametrize("content", [b"null", b'"x"', b"[[]]", b"{}", b"<html>"])
@pytest.mark.parametrize("part", ["/revision/", "/tree/"])
def test_an_answer_of_another_type_is_refused_in_a_line(hub, part, content):
    hub.change = lambda what, headers, body: content if part in what else body
    assert all("does not answer like a Hub" in each for each in refusals())


def test_a_server_decides_neither_the_length_of_an_answer_nor_how_long_it_takes(hub, monkeypatch):
    def changed(change):
        hub.change = lambda what, headers, body: change(headers, body) if "/tree/" in what else body
        return refusals()

    def one_more(headers, body):
        page = hub.requests[-1].split()[1]
        headers["Link"] = f'<{hub.url}{page}&more={len(hub.requests)}>; rel="next"'
        return body

    def the_same(headers, body):
        headers["Link"] = f'<{hub.url}{hub.requests[-1].split()[1]}>; rel="next"'
        return body

    def bomb(headers, body):
        headers["Content-Encoding"] = "gzip"
        return gzip.compress(bytes(1 << 20))

    monkeypatch.setattr(hub_responses, "_MAX_PAGES", 5)
    for change in (one_more, the_same):
        assert all("does not end its list of files" in each for each in changed(change))
    monkeypatch.setattr(hub_responses, "_MAX_BYTES", 1 << 16)
    assert all("sends more than 0 MiB" in each for each in changed(bomb))
    monkeypatch.setattr(hub_responses, "time", Mock(monotonic=count(0, 100).__next__))
    assert all("for an answer" in each for each in changed(lambda headers, body: body))


def test_a_server_that_sends_nothing_or_more_than_it_announced_is_left(hub, monkeypatch):
    monkeypatch.setattr(hub_repository, "_SLACK", -(1 << 30))
    with pytest.raises(UsageError, match="sends more than the .* MiB that it announced"):
        local_model("o/m")
    monkeypatch.setattr(hub_repository, "MAX_SILENCE_S", 0.2)

    def slow(what, headers, body):
        time.sleep(1.5)
        return body

    hub.change = slow
    assert all("has sent nothing for" in each for each in refusals())


def test_an_honest_server_may_compress_pages_and_redirect_within_the_hub(hub):
    def change(what, headers, body):
        if "/api/" not in what:
            return body
        headers["Content-Encoding"] = "gzip"
        return gzip.compress(body)

    hub.change = change
    assert (Path(local_model("o/m")).name, len(find_data("hf://o/d").files)) == (SHA, 2)
    assert not [each for each in hub.requests if "/cdn/" in each and TOKEN in each]


@pytest.mark.parametrize(("file", "content", "args"), [
    ("refs/main", OUT, "refs/main: not a commit"),
    ("refs/main", "..", "refs/main: not a commit"),
    ("refs/main", "\udcff", "refs/main: not UTF-8"),
    ("refs/main", None, "refs/main: links to"),
    (f"trees/{SHA}.json", "[]", "Expected `object`, got `array`"),
    (f"trees/{SHA}.json", '{"files": {"a.jsonl": 1}}', "Expected `object`, got `int`"),
    (f"trees/{SHA}.json", f'{{"files": {{"{OUT}": {{"size": 1}}}}}}', "not a file of a repository"),
    (f"trees/{SHA}.json", '{"files": {"/x": {"size": 1}}}', "is not a file of a repository"),
    (f"trees/{SHA}.json", '{"files": {"x": {"size": 1, "lfs_sha256": ".."}}}', "matching regex"),
    (f"snapshots/{SHA}", None, "links to .*, outside its repository"),
    (f"snapshots/{SHA}/a.jsonl", None, "a.jsonl links to .*, outside the directory"),
])  # fmt: skip
def test_a_cache_leads_nowhere_else(hub, file, content, args):
    folders = "models--o--m", "datasets--o--d"
    for folder, (path, find) in zip(folders, FINDERS.items(), strict=True):
        find(path)
        cache_path = Path("hub", folder, file)
        if find is local_model and not cache_path.exists():
            continue  # a file of the data
        cache_path.rename(f"hub/{folder}-away")  # other repositories may be there
        if content is None:
            cache_path.symlink_to(Path("hub", f"{folder}-away").absolute())
        else:
            cache_path.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(UsageError, match=args):
            find(path)


def test_files_that_repositories_share_in_a_cache_are_read_and_no_others(hub):
    file = Path(local_model("o/m"), "model.safetensors")
    shared = Path("hub/blobs/ab", "ab" * 32).absolute()
    shared.parent.mkdir(parents=True)
    blob = file.resolve()
    blob.rename(shared)
    blob.symlink_to(shared)
    os.close(open_regular(file))
    blob.unlink()
    blob.symlink_to(Path("hub/models--o--other/blobs/x").absolute())
    with pytest.raises(UsageError, match="outside its directory"):
        open_regular(file)


@pytest.mark.parametrize("revision", ["..", "a/../../x", "/etc/x", "x" * 300])
def test_a_revision_is_a_name_below_the_cache(revision):
    with pytest.raises(UsageError, match=f"o/m: {revision} is not a revision"):
        Repository("o/m", revision, "model", "o/m")
