"""A run directory of another user: fsdpctl follows no link in it and waits for no pipe."""

import os
import shutil
from pathlib import Path

import pytest

from fsdpctl.checkpoint.run_checkpoints import find_checkpoint
from fsdpctl.commands.status import read_status
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.io.files import open_nofollow, write_atomic
from fsdpctl.io.run_files import _CHECKED_NAMES, CHECKPOINTS, LATEST, LOGS, check_run_files
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.run.directory import inspect_run_dir
from tests.commands.run import TINY, fsdpctl, invoke, make_text
from tests.hostile import everything_in
from tests.run.runs import make_run, save

WAYS = ("link", "dangling link", "hard link", "pipe")


def put(path: Path, way: str, outside: Path) -> None:
    """Replace a file or directory by a link or pipe that leads outside."""
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    target = outside / ("folder" if is_folder else "file")
    if way == "pipe":
        os.mkfifo(path)
    elif way == "hard link" and not is_folder:
        path.hardlink_to(target)
    else:
        path.symlink_to(outside / "created" if way == "dangling link" else target)


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    (folder / "folder" / "step-00000009.tmp-x").mkdir(parents=True)
    for name in ("file", "folder/rank-00000.log", "folder/step-00000009.tmp-x/f"):
        (folder / name).write_text("mine")
    return folder


@pytest.mark.parametrize(
    "name", [*_CHECKED_NAMES, CHECKPOINTS, "wandb", f"{LOGS}/restart-1/rank-0.log"]
)
def test_whatever_leads_elsewhere_is_named(tmp_path, outside, name):
    for way in WAYS:
        run = make_run(tmp_path / way, done=1)
        (run / LOGS / "restart-1").mkdir()
        put(run / name, way, outside)
        for reads in (check_run_files, read_status, find_checkpoint):
            with pytest.raises(UsageError, match=name):
                reads(run)


def test_a_link_in_place_of_a_step_is_named_and_the_one_to_the_newest_is_followed(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    step = save(run, 3)
    (run / CHECKPOINTS / LATEST).symlink_to(step.name)
    (run / CHECKPOINTS / f"{LATEST}.tmp-1").symlink_to(step.name)  # of a killed process
    (tmp_path / "way").symlink_to(run)
    assert read_status(tmp_path / "way").warnings == []
    assert invoke("verify-checkpoint", str(run / CHECKPOINTS / LATEST))[0] == 0
    step.rename(tmp_path / step.name)
    for link, target in ((step, tmp_path / step.name), (run / CHECKPOINTS / LATEST, "../../x")):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        for args in ("status",), ("verify-checkpoint",), ("sample",):
            assert invoke(*args, str(run)) == (
                2, f"{link}: is a link to {target}; remove it, or replace the link by its target"
            )  # fmt: skip
        link.unlink()


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_not_opened_or_replaced_through_a_link(tmp_path, outside, way):
    before = everything_in(outside)
    (tmp_path / "run").mkdir()
    for name in (LOGS, "lock"):
        put(tmp_path / "run" / name, way, outside)
    for mode in ("ab", "ab+", "wb"):
        with pytest.raises(OSError, match=r"link|No such device"):
            open_nofollow(tmp_path / "run" / "lock", mode)
    (tmp_path / "run" / LOGS).unlink()
    (tmp_path / "run" / LOGS).symlink_to(outside / "folder")
    with pytest.raises(OSError, match="Not a directory"):
        open_nofollow(tmp_path / "run" / LOGS / "rank-00000.log", "wb", num_folders=1)
    (tmp_path / "run" / f"x.tmp-{os.getpid()}").symlink_to(outside / "file")
    write_atomic(tmp_path / "run" / "x", b"new")
    assert ((tmp_path / "run" / "x").read_bytes(), everything_in(outside)) == (b"new", before)


def test_files_are_appended_to_and_emptied_where_the_run_directory_is_a_link(tmp_path):
    (tmp_path / "run" / LOGS).mkdir(parents=True)
    (tmp_path / "way").symlink_to("run")
    path = tmp_path / "way" / LOGS / LOGS  # a file with the name of its directory
    for mode, expected in (("ab", b"1"), ("ab+", b"11"), ("wb", b"1")):
        with open_nofollow(path, mode, num_folders=1) as file:
            file.write(b"1")
        assert path.read_bytes() == expected


@pytest.mark.slow
def test_no_file_of_a_finished_run_is_used_through_a_link(tmp_path, outside):
    args = [
        *TINY, f"data.path={make_text(tmp_path)}", "launch.nproc_per_node=2", "train.steps=6",
        f"train.run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert fsdpctl("train", *args, "train.profile=true", cwd=tmp_path).returncode == 0
    known = (*_CHECKED_NAMES, CHECKPOINTS)
    assert {each.name for each in (tmp_path / "run").iterdir()} <= set(known)
    names = [
        str(each.relative_to(tmp_path / "run"))
        for each in (tmp_path / "run").rglob("*")
        if each.parent.name != CHECKPOINTS and each.parent.parent.name != CHECKPOINTS
    ]
    assert len(names) > 10
    before = everything_in(outside)
    settings = [*args[:-1], f"train.run_dir={tmp_path / 'copy'}"]
    config = stored_config(compose_config(settings).config)
    for name in names:
        shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
        put(tmp_path / "copy" / name, "link", outside)
        with pytest.raises(FsdpctlError, match=name):
            inspect_run_dir(config, "auto")
        shutil.rmtree(tmp_path / "copy")
    assert everything_in(outside) == before
