"""A run resumes only with the data of its earlier steps; an error names changed files."""

import json

import numpy as np
import pytest

from fsdpctl.checkpoint.run_checkpoints import step_folder
from fsdpctl.config.compose import compose_config
from fsdpctl.config.serialize import to_settings
from fsdpctl.errors import UsageError
from fsdpctl.io.activity import Reporter
from fsdpctl.io.run_files import CHECKPOINTS, DATA
from fsdpctl.launch.prepare_run import prepare_run
from fsdpctl.resolve.prepare import prepare
from fsdpctl.run import data_record
from fsdpctl.run.directory import inspect_run_dir
from tests.commands.run import TINY, invoke
from tests.hostile import make_checkpoint, reseal
from tests.run.runs import write_heartbeat

KINDS = {
    "text": ("data=text", "data.path=d"), "mixture": ("data=text", "data.path=d/a.txt:3,d/b.txt:1"),
    "validation": ("data=text", "data.path=d/a.txt", "data.val_path=d/b.txt"),
    "tokens": ("data=tokens", "data.path=t", "data.format=uint16", "model.vocab_size=256"),
}  # fmt: skip


def typed(kind, *more):
    last = dict(w.split("=", 1) for w in (*TINY, "launch.nproc_per_node=1", *KINDS[kind], *more))
    return [f"{name}={value}" for name, value in last.items()]


def started(args, resume="auto"):
    begun = prepare_run(compose_config(args), args, resume, Reporter(print, print, print))
    assert begun is not None
    begun.lock.release()
    return begun


@pytest.fixture(params=KINDS)
def run(request, tmp_path, monkeypatch):
    """Make a run with a checkpoint at step 2 of 4; return its kind of data and settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "t").mkdir()
    for name in "ab":
        (tmp_path / "d" / f"{name}.txt").write_text(f"{name} line {name * 7}\n" * 400)
        np.full(4000, ord(name), "<u2").tofile(tmp_path / "t" / f"{name}.bin")
    args = typed(request.param, "train.steps=4", "train.run_dir=R")
    config, opened = started(args).config, prepare(compose_config(args))
    folder = make_checkpoint(step_folder(tmp_path / "R" / CHECKPOINTS, 2))
    options = {"step": 2, "samples": 16, "data_fingerprint": opened.data.fingerprint}
    reseal(folder, lambda content: content["progress"].update(options))
    reseal(folder, lambda content: content.update(config=to_settings(config)))
    return request.param, args


def test_a_dry_run_and_a_start_name_the_file_that_has_changed_and_the_way_on_works(run, tmp_path):
    kind, args = run
    assert "it would run" in invoke("train", *args, "--dry-run")[1]
    name, more = ("t/b.bin", b"a\0" * 80) if kind == "tokens" else ("d/b.txt", b"more" * 40)
    with (tmp_path / name).open("ab") as file:
        file.write(more)
    code, out = invoke("train", *args, "--dry-run")
    assert code == 2
    hint = "restore the old data, or pass --resume R train.run_dir=NEW"
    assert f"(changed {tmp_path / name}); {hint}" in out
    with pytest.raises(UsageError, match=rf"changed {tmp_path / name}\)"):
        started(args)
    new = [*args[:-1], "train.run_dir=NEW"]
    assert "it would run" in invoke("train", *new, "--dry-run", "--resume", "R")[1]
    assert started(new, "R").step == 2
    assert started(new).step == 2  # the new run has no checkpoint yet
    data = prepare(compose_config(new)).data
    assert data_record.recorded_fingerprint(tmp_path / "NEW") == data.fingerprint
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-160])
    with pytest.raises(UsageError, match="train.run_dir=NEW: the data has changed"):
        started(new)


@pytest.mark.parametrize("run", ["text", "tokens"], indirect=True)
def test_files_that_come_and_go_are_named_and_of_many_the_number(run, tmp_path, monkeypatch):
    kind, args = run
    folder, end = ("t", "bin") if kind == "tokens" else ("d", "txt")
    (tmp_path / folder / f"a.{end}").rename(tmp_path / folder / f"c.{end}")
    names = [f"{tmp_path / folder / name}.{end}" for name in "ca"]
    assert f"(added {names[0]}; removed {names[1]})" in invoke("train", *args, "--dry-run")[1]
    (tmp_path / folder / f"e.{end}").write_bytes((tmp_path / folder / f"c.{end}").read_bytes())
    monkeypatch.setattr(data_record, "_MOST_FILES", 1)
    assert "(2 files before, 3 now)" in invoke("train", *args, "--dry-run")[1]


def test_the_record_stays_small_whatever_the_number_of_files(tmp_path, monkeypatch):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"line {number}\n" * 40)
    data = prepare(compose_config([*TINY, f"data.path={tmp_path}"])).data
    monkeypatch.setattr(data_record, "_MOST_FILES", 29)
    data_record.write_data_record(tmp_path, data)
    record = json.loads((tmp_path / DATA).read_text())
    assert (record["count"], record["files"]) == (30, {})


@pytest.mark.parametrize("run", ["text"], indirect=True)
def test_a_dry_run_refuses_a_living_run_and_damage_and_writes_nothing(run, tmp_path):
    _, args = run
    write_heartbeat(tmp_path / "R", host="elsewhere")
    assert invoke("train", *args, "--dry-run")[1].startswith("train.run_dir=R: in use by a run on")
    write_heartbeat(tmp_path / "R", state="ended")
    before = sorted(tmp_path.rglob("*"))
    assert "it would run" in invoke("train", *args, "--dry-run")[1]
    assert sorted(tmp_path.rglob("*")) == before
    (file,) = (tmp_path / "R").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert invoke("train", *args, "--dry-run")[0] == 4


@pytest.mark.parametrize("run", ["text"], indirect=True)
def test_the_state_of_another_optimizer_is_refused_before_the_start(run, tmp_path):
    _, args = run
    folder = step_folder(tmp_path / "R" / CHECKPOINTS, 2)
    states = {"exp_avg/x": {"shape": [0], "dtype": "F32"}}
    reseal(folder, lambda content: content["tensors"].update(states))
    config = prepare(compose_config([*args[:-1], "train.run_dir=NEW", "optimizer=muon"])).config
    with pytest.raises(UsageError, match=r"has states of optimizer=adamw.*model.path=R$"):
        inspect_run_dir(config, "R")
