"""The end of a run, in which callbacks take part, and its journal."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdpctl.checkpoint import save
from fsdpctl.checkpoint.run_checkpoints import complete_checkpoints
from fsdpctl.comm.mesh import ObjectExchange
from fsdpctl.config.schema import Config
from fsdpctl.errors import FsdpctlError, NonFiniteError, StoppedError
from fsdpctl.io.run_files import CHECKPOINTS, LOGS, METRICS
from fsdpctl.run.environment import read_start_events
from fsdpctl.run.heartbeat import read_heartbeat
from fsdpctl.training import trackers
from fsdpctl.training.callbacks import checkpoints as checkpoints_module
from fsdpctl.training.callbacks.checkpoints import Checkpoints
from fsdpctl.training.callbacks.heartbeat import Heartbeat
from fsdpctl.training.journal import Journal
from fsdpctl.training.trainer import Trainer
from tests.checkpoint.test_saver import fake_checkpoints
from tests.distributed import distributed
from tests.training.ranks import lines, new_trainer, plant, run_args

RUN = cast(Trainer, SimpleNamespace())


UPLOADED = "uploaded"


class SlowStore:
    """An object store without a network."""

    def upload(self, folder: Path) -> None:
        time.sleep(0.2)
        (folder.parent / UPLOADED).touch()

    def remove_old(self, keep: object, newest: Path) -> None:
        pass


def configured(**kwargs: Any) -> Config:
    config = replace(Config(), **kwargs)
    return replace(config, train=replace(config.train, steps=9))


def journal_in(folder: Path, config: Config, step: int = 0, *, rank: int = 0) -> Journal:
    (folder / LOGS).mkdir(exist_ok=True)
    return Journal(config, folder, step, is_rank_0=rank == 0, shows=rank == 0)


@pytest.mark.parametrize(("error", "state"), [
    (None, "ended"), (StoppedError("stopped at step 7"), "stopped"),
    (NonFiniteError("step 7: loss nan"), "stopped"),
])  # fmt: skip
@distributed(world_size=2)
def test_ranks_end_together_once_the_upload_is_done(
    rank: int, world_size: int, error: Exception | None, state: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checkpoints_module, "remote_checkpoints_of", lambda config: SlowStore())
    config = configured()
    journal, ranks = journal_in(tmp_path, config, rank=rank), ObjectExchange()
    checkpoints = Checkpoints(config, ranks, journal, (), uploads=rank == 0)
    heartbeat = Heartbeat(tmp_path, ranks, is_on=rank == 0)
    if rank == 0:
        journal.write_metrics({"step": 7, "loss": 1.0})
        checkpoints._uploads.add(fake_checkpoints(tmp_path / "checkpoints", 7)[0], 7)
    for each in (checkpoints, heartbeat):
        each.end(RUN, error)
    assert (tmp_path / "checkpoints" / UPLOADED).exists()
    if rank == 0:
        record = read_heartbeat(tmp_path)
        assert record is not None
        assert (record.state, record.message) == (state, "" if error is None else str(error))
    journal.close_metrics()


@distributed(world_size=2)
def test_ranks_that_end_together_do_not_disturb_a_save_in_progress(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 1, which still writes its shard when a step is rejected."""
    write_rank, has_ended = save._write_rank, Event()

    def write_slowly(*args: Any) -> Any:
        assert rank == 0 or has_ended.wait(30)
        return write_rank(*args)

    monkeypatch.setattr(save, "_write_rank", write_slowly)
    trainer = new_trainer(
        run_args(tmp_path, world_size, "checkpoint.mode=async", f"train.run_dir={tmp_path / 'run'}")
    )
    with plant(trainer, {4: ("loss", 0)}), pytest.raises(NonFiniteError):
        trainer.run()
    has_ended.set()
    trainer.finish_pending()
    (saved,) = complete_checkpoints(trainer.parts.run_dir / CHECKPOINTS)
    assert saved.name.endswith("4")


@distributed(world_size=2)
def test_a_rank_that_fails_alone_does_not_wait(rank: int, world_size: int, tmp_path: Path) -> None:
    ranks = ObjectExchange()
    if rank == 1:
        return
    Heartbeat(tmp_path, ranks).end(RUN, RuntimeError("planted"))
    record = read_heartbeat(tmp_path)
    assert record is not None
    assert (record.state, record.message) == ("failed", "RuntimeError: planted")


def test_values_reach_the_trackers_and_a_failed_tracker_is_lines(tmp_path, monkeypatch, capsys):
    def fail(config: Config, run_dir: Path, step: int) -> Any:
        raise ValueError("no room")

    monkeypatch.setitem(trackers._TRACKERS, "tensorboard", fail)
    log = replace(Config().log, trackers="tensorboard")
    journal = journal_in(tmp_path, configured(log=log), 5)
    sent: list[Any] = []
    monkeypatch.setattr(journal.trackers, "log_line", sent.append)
    journal.write_metrics({"step": 6, "loss": 1.0})
    warning = "log.trackers=tensorboard: no room; the run continues without it"
    assert warning in capsys.readouterr().out
    journal.warn("odd")
    journal.warn("saved, but late", 4)
    assert lines(tmp_path) == sent == [{"step": 6, "loss": 1.0}]
    warnings = [f"step 5: {warning}", "step 6: odd", "step 4: saved, but late"]
    assert read_start_events(tmp_path)[-1].warnings == warnings
    journal.close_metrics()
    journal.warn("late")  # as from a thread, after the end


@pytest.mark.parametrize("way", ["deleted", "moved", "replaced"])
def test_a_run_directory_that_is_lost_is_an_error(tmp_path, way):
    run = tmp_path / "run"
    run.mkdir()
    journal = journal_in(run, configured())
    journal.check_not_removed()
    if way == "deleted":
        shutil.rmtree(run)
    elif way == "moved":
        run.rename(tmp_path / "elsewhere")
    else:
        (run / METRICS).unlink()
        (run / METRICS).touch()
    with pytest.raises(FsdpctlError, match="deleted or moved during the run"):
        journal.check_not_removed()
    journal.close_metrics()
    journal_in(tmp_path, configured(), rank=1).check_not_removed()  # rank 0 alone decides
