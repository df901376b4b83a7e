"""Checkpoints in an object store, with its faults; the store is fsspec's, in memory."""

import filecmp
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from fsdpctl.checkpoint import remote_checkpoints
from fsdpctl.checkpoint.consolidate import consolidate
from fsdpctl.checkpoint.publish import CheckpointMetadata, atomic_directory, write_manifest
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.remote_checkpoints import RemoteCheckpoints, open_checkpoint
from fsdpctl.checkpoint.run_checkpoints import complete_checkpoints, copy_checkpoint, step_folder
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import config_to_yaml, to_settings
from fsdpctl.config.training import CheckpointConfig
from fsdpctl.data.tokenizer_files import TEMPLATES
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError
from fsdpctl.io import stores
from fsdpctl.io.activity import Reporter
from fsdpctl.io.run_files import CHECKPOINTS, MANIFEST, RUN_CONFIG
from fsdpctl.launch import prepare_run as module
from fsdpctl.launch.prepare_run import prepare_run
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.run.directory import StartKind, inspect_run_dir, prepare_run_dir
from fsdpctl.training.callbacks import checkpoints as checkpoints_module
from fsdpctl.training.callbacks.checkpoints import UploadOutcome, Uploads
from tests.commands.test_interruptions import wait_for
from tests.hostile import TINY_MODEL, make_checkpoint, reseal

URL = "memory://bucket/runs/run"
STEPS = (10, 20, 30, 40)


class Killed(BaseException):
    """An exception in place of the end of the process."""


ERRORS = {"killed": Killed, "denied": PermissionError, "lost": FileNotFoundError}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the directory of a run with checkpoints, in a process with an empty store."""
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(stores, "STORES", ("memory",))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    for step in STEPS:
        folder = make_checkpoint(step_folder(tmp_path / "run" / CHECKPOINTS, step))
        reseal(folder, partial(set_step, step))
    return tmp_path / "run"


def set_step(step: int, content: dict[str, Any]) -> None:
    content["progress"]["step"] = step


def folders(run: Path) -> list[Path]:
    return [step_folder(run / CHECKPOINTS, step) for step in STEPS]


def files_of(name: str) -> dict[str, bytes]:
    store = MemoryFileSystem()
    result = store.find(f"/bucket/runs/run/{name}")
    return {Path(each).name: store.cat_file(each) for each in result}


def are_equal(one: Path, other: Path) -> bool:
    names = [each.name for each in one.iterdir()]
    same = filecmp.cmpfiles(one, other, names, shallow=False)[0]
    return sorted(same) == sorted(names) == sorted(each.name for each in other.iterdir())


def test_a_checkpoint_comes_back_as_it_was(run, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_checkpoints, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(remote_checkpoints, "_MIN_BLOCK_BYTES", 3000)
    there = RemoteCheckpoints(URL)
    assert there.newest() is None
    first, second, *_ = folders(run)
    there.upload(first)
    there.upload(first)  # the store has it
    there.upload(second)
    assert [each.name for each in there.complete()] == [first.name, second.name]
    for source, folder in ((URL, second), (f"{URL}/{first.name}/", first)):
        reader = open_checkpoint(source)
        assert str(reader) == f"{URL}/{folder.name}"
        assert sum(reader.verify()) == sum(CheckpointReader(folder).verify())
        copy_checkpoint(reader, tmp_path / "copies" / folder.name)
        assert are_equal(folder, tmp_path / "copies" / folder.name)
        consolidate(reader, tmp_path / "out", overwrite=True)
        consolidate(CheckpointReader(folder), tmp_path / "expected", overwrite=True)
        assert are_equal(tmp_path / "expected", tmp_path / "out")


def test_a_checkpoint_with_templates_is_copied_whole(run, tmp_path):
    source = CheckpointReader(folders(run)[0])
    files = {name: source.attachment(name) for name in source.manifest.attachments}
    attachments = {**files, f"{TEMPLATES}/tool.jinja": b"{{ x }}"}
    options = CheckpointMetadata(Progress(50), attachments=attachments)
    folder = step_folder(run / CHECKPOINTS, 50)
    with atomic_directory(folder) as scratch:
        source.copy_files(scratch)
        (scratch / MANIFEST).unlink()
        for name in files:
            (scratch / name).unlink()
        manifest = source.manifest
        write_manifest(scratch, options, manifest.files, manifest.tensors, 1)
    RemoteCheckpoints(URL).upload(folder)
    for number, reader in enumerate((CheckpointReader(folder), open_checkpoint(URL))):
        copy_checkpoint(reader, tmp_path / str(number))
        copy = CheckpointReader(tmp_path / str(number))
        assert copy.attachment(f"{TEMPLATES}/tool.jinja") == b"{{ x }}"


def test_a_block_is_fetched_once_and_before_it_is_needed(run, monkeypatch):
    monkeypatch.setattr(remote_checkpoints, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(remote_checkpoints, "_MIN_BLOCK_BYTES", 3000)
    RemoteCheckpoints(URL).upload(folders(run)[0])
    reader = open_checkpoint(URL)
    requests: Counter[tuple[int, int]] = Counter()
    plain = MemoryFileSystem.cat_file

    def counted(self, path, start=None, end=None, **kwargs):
        requests[start, end] += 1
        return plain(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    key = next(iter(reader.manifest.tensors))
    next(iter(reader.read(key)))
    assert len(requests) >= 3
    list(reader.verify())
    size = (folders(run)[0] / "rank-00000.safetensors").stat().st_size
    assert max(requests.values()) == 1
    assert {pair for pair in requests if pair[1] - pair[0] == 3000} >= {(3000, 6000), (6000, 9000)}
    assert max(end for _, end in requests) == size


def test_old_checkpoints_and_remains_are_deleted(run):
    there = RemoteCheckpoints(URL)
    keep = CheckpointConfig(keep_last=1, keep_every=20)
    for folder in folders(run)[:3]:
        there.upload(folder)
    MemoryFileSystem().rm_file(f"/bucket/runs/run/{folders(run)[2].name}/{MANIFEST}")
    there.upload(folders(run)[3])
    MemoryFileSystem().pipe_file("/bucket/runs/run/step-00000050/rank-00000.safetensors", b"x")
    MemoryFileSystem().pipe_file("/bucket/runs/run/notes.txt", b"mine")
    there.remove_expired(keep, folders(run)[3])
    assert [each.name for each in there.complete()] == [folders(run)[i].name for i in (1, 3)]
    assert not files_of(folders(run)[2].name)
    assert files_of("step-00000050")  # newer
    assert files_of("notes.txt")  # not a file of the run


def test_another_checkpoint_of_the_step_is_replaced(run):
    there, folder = RemoteCheckpoints(URL), folders(run)[0]
    there.upload(folder)
    reseal(folder, lambda content: content["progress"].update(samples=7))
    there.upload(folder)
    assert files_of(folder.name) == {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.mark.parametrize(("name", "change", "error"), [
    ("rank-00000.safetensors", lambda old: old[:-1], "truncated or corrupted"),
    ("rank-00000.safetensors", lambda old: old[:-1] + bytes([old[-1] ^ 1]),
     "the checksum of .* does not"),
    ("rank-00000.safetensors", lambda old: old[:20] + b"?" + old[21:], "corrupted"),
    ("tokenizer.json", lambda old: b"?" + old[1:], "corrupted: does not match"),
    (MANIFEST, lambda old: old[:100], "corrupted"), (MANIFEST, None, "FileNotFoundError"),
    ("tokenizer.json", None, "FileNotFoundError"),
])  # fmt: skip
def test_what_is_damaged_there_is_named_by_its_url(run, tmp_path, name, change, error):
    there, folder = RemoteCheckpoints(URL), folders(run)[0]
    there.upload(folder)
    path, store = f"/bucket/runs/run/{folder.name}/{name}", MemoryFileSystem()
    old = store.cat_file(path)
    store.rm_file(path)
    if change is not None:
        store.pipe_file(path, change(old))
    with pytest.raises(CheckpointError, match=f"^{URL}/{folder.name}/{name}: .*{error}"):
        copy_checkpoint(open_checkpoint(f"{URL}/{folder.name}"), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    if name != MANIFEST:
        with pytest.raises(CheckpointError, match=f"{URL}/{folder.name}"):
            list(open_checkpoint(URL).verify())


@contextmanager
def fault_at(number: int, kind: str) -> Iterator[list[str]]:
    """Make one call of the store fail, and all later calls if denied; yield the calls."""
    calls: list[str] = []

    def failing(name: str) -> Any:
        plain = getattr(MemoryFileSystem, name)

        def call(self, path, *args, **kwargs):
            calls.append(name)
            is_due = len(calls) == number or (kind == "denied" and len(calls) > number)
            if is_due and kind in ERRORS:
                raise ERRORS[kind](kind)
            if is_due and kind == "dropped" and name in ("put_file", "rm"):
                return None
            result = plain(self, path, *args, **kwargs)
            if is_due and kind == "damaged" and name == "put_file":
                self.pipe_file(args[0], b"damaged")
            return result

        return mock.patch.object(MemoryFileSystem, name, call)

    with ExitStack() as stack:
        for name in ("put_file", "cat_file", "rm", "ls", "info"):
            stack.enter_context(failing(name))
        yield calls


@pytest.mark.parametrize("kind", [*ERRORS, "dropped", "damaged"])
def test_no_fault_makes_a_checkpoint_that_is_wrong_or_lost(run, tmp_path, kind):
    older, newer, *_ = folders(run)
    whole = {each.name: {f.name: f.read_bytes() for f in each.iterdir()} for each in (older, newer)}
    there, copy = RemoteCheckpoints(URL), tmp_path / "copy"
    for number in count(1):
        MemoryFileSystem.store.clear()
        there.upload(older)
        with fault_at(number, kind) as calls, suppress(FsdpctlError, Killed):
            there.upload(newer)
            there.remove_expired(CheckpointConfig(keep_last=1), newer)
            copy_checkpoint(open_checkpoint(URL), copy)
        left = [each.name for each in there.complete()]
        assert left
        assert all(files_of(name) == whole[name] for name in left), (number, calls)
        if copy.exists():
            assert are_equal(newer, copy)
            shutil.rmtree(copy)
        there.upload(newer)
        assert files_of(newer.name) == whole[newer.name]
        if len(calls) < number:
            return


def test_an_upload_that_fails_is_reported_and_fails_the_run_at_its_end(run, monkeypatch):
    messages: list[UploadOutcome] = []
    uploads = Uploads(CheckpointConfig(keep_last=0), run, messages.append, RemoteCheckpoints(URL))
    first, second, *_ = folders(run)
    with monkeypatch.context() as planting:
        planting.setattr(MemoryFileSystem, "put_file", lambda *args, **kwargs: 1 / 0)
        uploads.add(first, 10)
        uploads.wait(pytest.fail)
        error = f"^step 10: .* not uploaded: {URL}/.* run the same command"
        with pytest.raises(FsdpctlError, match=error):
            uploads.check()
    uploads.add(second, 20)
    uploads.wait(pytest.fail)
    uploads.check()
    assert [each.has_failed for each in messages] == [True, False]
    assert "ZeroDivisionError" in messages[0].message
    assert str(first) in messages[0].message
    assert [each.name for each in RemoteCheckpoints(URL).complete()] == [second.name]


def test_a_slow_store_gets_the_newest_checkpoint_and_those_to_keep(run, monkeypatch):
    messages: list[UploadOutcome] = []
    keep = CheckpointConfig(keep_last=1, keep_every=30)
    uploads = Uploads(keep, run, messages.append, RemoteCheckpoints(URL))
    gate = threading.Event()
    plain = RemoteCheckpoints.upload

    def wait(self, folder):
        assert gate.wait(30)
        plain(self, folder)

    monkeypatch.setattr(RemoteCheckpoints, "upload", wait)
    for step, folder in zip(STEPS, folders(run), strict=True):
        uploads.add(folder, step)
        wait_for(lambda: uploads.uploading is not None)
    uploads.remove_old()
    assert complete_checkpoints(run / CHECKPOINTS) == [  # the first is being uploaded
        step_folder(run / CHECKPOINTS, step) for step in (10, 30, 40)
    ]
    monkeypatch.setattr(checkpoints_module, "_REPORT_INTERVAL", 0.05)

    def go_on(line: str) -> None:
        assert line.startswith("waiting for checkpoint.remote: 0 s")
        gate.set()

    uploads.wait(go_on)
    sent = [(each.step, each.seconds > 0) for each in messages]
    assert sent == [(10, True), (20, False), (30, True), (40, True)]
    names = [each.name for each in RemoteCheckpoints(URL).complete()]
    assert names == [each.name for each in folders(run)[2:]]


def test_a_run_resumes_from_its_store(run, tmp_path):
    settings = [*TINY_MODEL, "train.steps=40", "checkpoint.remote=memory://bucket/runs"]
    here = tmp_path / "new" / "run"
    config = stored_config(compose_config([*settings, f"train.run_dir={here}"]).config)
    assert inspect_run_dir(config, "auto").start_kind is StartKind.NEW
    for folder in folders(run):
        reseal(folder, lambda content: content.update(config=to_settings(config)))
    RemoteCheckpoints(URL).upload(folders(run)[1])
    seen = inspect_run_dir(config, "auto")
    assert (seen.start_kind, seen.step, str(seen.source)) == (
        StartKind.RESUME, 20, f"{URL}/{folders(run)[1].name}",
    )  # fmt: skip
    assert inspect_run_dir(config, "auto", ignores_remote=True).start_kind is StartKind.NEW
    assert inspect_run_dir(config, "never").run_dir.name == "run-2"
    here.mkdir(parents=True)
    prepare_run_dir(seen, config, [], {})
    assert are_equal(folders(run)[1], here / CHECKPOINTS / folders(run)[1].name)
    assert inspect_run_dir(config, "auto").source is None  # the checkpoint is local now
    RemoteCheckpoints(URL).upload(folders(run)[2])
    seen = inspect_run_dir(config, "auto")
    assert (seen.step, seen.stored_config) == (30, config)
    other = replace(config, train=replace(config.train, seed=3))
    with pytest.raises(UsageError, match=f"^train.run_dir={here}: contains a run"):
        inspect_run_dir(other, "auto")
    elsewhere = replace(other, train=replace(other.train, run_dir=str(tmp_path / "more" / "run")))
    with pytest.raises(UsageError, match=f"^{URL}/.*train.seed 0 -> 3.*--resume {URL}/"):
        inspect_run_dir(elsewhere, "auto")
    older = here.parent / "older" / "run"  # has a newer checkpoint than the store
    older.mkdir(parents=True)
    (older / RUN_CONFIG).write_text(config_to_yaml(other))
    make_checkpoint(step_folder(older / CHECKPOINTS, 50))
    with pytest.raises(UsageError, match=f"^{URL}/.*contains a run"):
        inspect_run_dir(replace(other, train=replace(other.train, run_dir=str(older))), "auto")


def test_a_finished_run_completes_its_upload(run, monkeypatch):
    settings = [*TINY_MODEL, "train.steps=40", "checkpoint.remote=memory://bucket/runs"]
    config = stored_config(compose_config([*settings, f"train.run_dir={run}"]).config)
    for folder in folders(run):
        reseal(folder, lambda content: content.update(config=to_settings(config)))
    (run / RUN_CONFIG).write_text(config_to_yaml(config))
    monkeypatch.setattr(module, "prepare", lambda *_, **__: SimpleNamespace(config=config))
    messages: list[str] = []
    talk = Reporter(messages.append, messages.append, messages.append)
    assert prepare_run(compose_config(settings), [], "auto", talk) is None
    assert messages[0] == f"{run}: finished at step 40; nothing to do"
    stored = [each.name for each in RemoteCheckpoints(URL).complete()]
    assert stored == [each.name for each in folders(run)[-2:]]


def test_a_store_that_fails_is_not_taken_for_an_empty_one(run, tmp_path, monkeypatch):
    RemoteCheckpoints(URL).upload(folders(run)[0])
    args = [*TINY_MODEL, "train.steps=40", "checkpoint.remote=memory://bucket/runs"]
    config = stored_config(compose_config([*args, f"train.run_dir={tmp_path}/new/run"]).config)
    for name in ("ls", "info"):
        with monkeypatch.context() as planting:
            planting.setattr(MemoryFileSystem, name, lambda *args, **kwargs: slow_store())
            with pytest.raises(FsdpctlError, match=f"^{URL}.*: TimeoutError: slow"):
                inspect_run_dir(config, "auto")
            with pytest.raises(FsdpctlError, match=f"^{URL}.*: TimeoutError: slow"):
                inspect_run_dir(config, "never")


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_replaced(run, monkeypatch):
    there, folder = RemoteCheckpoints(URL), folders(run)[0]
    there.upload(folder)
    with monkeypatch.context() as planting:
        planting.setattr(MemoryFileSystem, "cat_file", lambda *args, **kwargs: slow_store())
        with pytest.raises(FsdpctlError, match=f"^{URL}/{folder.name}/{MANIFEST}: TimeoutError"):
            there.upload(folder)
    assert [each.name for each in there.complete()] == [folder.name]


def slow_store() -> bytes:
    raise TimeoutError("slow")


def test_a_header_that_claims_to_be_long_is_not_fetched(run):
    RemoteCheckpoints(URL).upload(folders(run)[0])
    path = f"/bucket/runs/run/{folders(run)[0].name}/rank-00000.safetensors"
    content = MemoryFileSystem().cat_file(path)
    MemoryFileSystem().pipe_file(path, (len(content) - 8).to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: "):
        open_checkpoint(URL)
    MemoryFileSystem().pipe_file(path, (1 << 40).to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: .*incomplete header"):
        open_checkpoint(URL)


def test_a_password_is_not_written_to_checkpoints(tmp_path):
    args = [*TINY_MODEL, "checkpoint.remote=sftp://me:secret@host/runs"]
    with pytest.raises(UsageError, match="^checkpoint.remote: a URL with a user, password"):
        compose_config(args)


def test_a_store_that_cannot_be_written_is_refused_at_the_start(run, monkeypatch):
    RemoteCheckpoints(URL).check_writable()
    assert not files_of("")

    def denied(self, path, content):
        raise PermissionError("expired token")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", denied)
    with pytest.raises(UsageError, match=f"^{URL}/write-check: PermissionError: expired token"):
        RemoteCheckpoints(URL).check_writable()


def test_what_is_no_run_in_a_store_is_refused(run):
    with pytest.raises(UsageError, match="memory://bucket/nothing: no complete checkpoint found"):
        open_checkpoint("memory://bucket/nothing")
    with pytest.raises(UsageError, match="nostore://x: "):
        open_checkpoint("nostore://x")
