"""Trackers store and show the numbers of runs; each is imported if `log.trackers` names it.

Note: a failed run repeats the steps after its checkpoint, with the same values, because a resume is
exact. Each tracker continues its run and gets each value once. TensorBoard drops the values after
the checkpoint. fsdpctl does not resend a value that is both in metrics.jsonl and in the tracker. It
sends earlier values that a killed process had not sent. The run directory has the trackers' run id.
"""

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import to_settings
from fsdpctl.errors import UsageError
from fsdpctl.io import files
from fsdpctl.io.files import checked_name, open_regular, read_text_file
from fsdpctl.io.packages import install_hint
from fsdpctl.io.run_files import TENSORBOARD, TRACKER_ID

_CLOSE_SECONDS, _FAILED_CLOSE_SECONDS = 60.0, 5.0  # time to send the remaining values
_FLUSH_SECONDS = 10  # a killed run may lose the values of this time
_ID = r"[a-z0-9]{1,64}"
_MAX_MESSAGE = 300  # characters of a message
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"  # environment variable
_BLOCK = 1 << 15  # bytes that wandb writes at a time
_MAX_PARAMS, _MAX_METRICS, _MAX_PARAM = 100, 1000, 500  # limits of a request to MLflow


class _TensorBoard:
    """Event files in the run directory."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run_dir / TENSORBOARD)
        self._writer = SummaryWriter(folder, purge_step=step + 1, flush_secs=_FLUSH_SECONDS)
        self._checkpoint_step = step

    def is_stored(self, step: int, name: str) -> bool:
        """Return whether the tracker has stored a value in an earlier start."""
        return step <= self._checkpoint_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store values without waiting for a server."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, succeeded: bool) -> None:
        """Store the remaining values, which may take long."""
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases, whose steps only increase."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        import wandb

        run_id = _tracker_id(run_dir)
        logs = [*run_dir.glob(f"wandb/offline-run-*-{run_id}/*.wandb")]
        self._run = wandb.init(
            id=run_id, resume="allow", project=_project(config, "WANDB_PROJECT"),
            name=run_dir.name, dir=str(run_dir), config=to_settings(config),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        # Without a server, wandb does not know the steps that earlier processes have logged.
        resumed = self._run.resumed
        self._first_unstored = self._run.starting_step if resumed else _next_wandb_step(logs)
        self._newest = self._first_unstored if resumed else 0

    def is_stored(self, step: int, name: str) -> bool:
        return step < self._first_unstored

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._newest = max(self._newest, step)
        # wandb drops values of a lower step: late values go to its newest step.
        self._run.log(dict(values), step=self._newest)

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class _Trackio:
    """A run of Trackio, in its database on this machine or as its environment variables say."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        import trackio

        with redirect_stdout(StringIO()):
            name = f"{run_dir.name}-{_tracker_id(run_dir)}"
            options = {"config": to_settings(config), "resume": "allow", "embed": False}
            self._run = trackio.init(_project(config, "TRACKIO_PROJECT"), name, **options)
        self._last = getattr(self._run, "_initial_last_step", None)

    def is_stored(self, step: int, name: str) -> bool:
        return self._last is None or step <= self._last

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, succeeded: bool) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


class _Mlflow:
    """A run of MLflow, found by a tag. A thread sends the values of several steps at once."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        project, run_id = _project(config, "MLFLOW_EXPERIMENT_NAME"), _tracker_id(run_dir)
        # With MLflow's default number of retries, an unreachable server delays a start by minutes.
        if is_default := _RETRIES not in os.environ:
            os.environ[_RETRIES] = "2"
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            experiment_id = self._client.create_experiment(project)
        else:
            experiment_id = experiment.experiment_id
        query = f"tags.fsdpctl = '{run_id}'"
        runs = self._client.search_runs([experiment_id], query, max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            options = {"tags": {"fsdpctl": run_id}, "run_name": run_dir.name}
            self._run_id = self._client.create_run(experiment_id, **options).info.run_id
            params = [Param(name, x[:_MAX_PARAM]) for name, x in to_settings(config).items()]
            for start in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
        if is_default:
            del os.environ[_RETRIES]
        self._steps: dict[str, set[int]] = {}  # stored steps by name
        self._error: Exception | None = None
        self._queue = SimpleQueue[Any]()
        self._sender = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._sender.start()

    def is_stored(self, step: int, name: str) -> bool:
        if name not in self._steps:
            stored = self._client.get_metric_history(self._run_id, _mlflow_name(name))
            # Later calls ask for later steps only.
            self._steps[name] = {each.step for each in stored if each.step >= step}
        return step in self._steps[name]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._error is not None:
            raise self._error
        now = int(1000 * time.time())
        for name, value in values.items():
            self._queue.put(self._metric(_mlflow_name(name), value, now, step))

    def close(self, *, succeeded: bool) -> None:
        self._queue.put(None)
        self._sender.join()
        if self._error is not None:
            raise self._error
        self._client.set_terminated(self._run_id, "FINISHED" if succeeded else "FAILED")

    def _send(self) -> None:
        is_over = False
        while not is_over:
            values = [self._queue.get()]
            while len(values) < _MAX_METRICS and not self._queue.empty():
                values.append(self._queue.get())
            is_over = values[-1] is None
            try:
                self._client.log_batch(self._run_id, metrics=values[: len(values) - is_over])
            except Exception as error:
                self._error = error
                return


Tracker = _TensorBoard | _Wandb | _Trackio | _Mlflow
_TRACKERS: dict[str, Callable[[Config, Path, int], Tracker]] = {
    "tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio, "mlflow": _Mlflow
}  # fmt: skip


class Trackers:
    """The configured trackers. If a tracker fails, it is dropped, and the run continues."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        step: int,
        warn: Callable[[str], None],
        earlier: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start the trackers of a run that continues after `step`; `warn` gets failures.

        `earlier` contains the last lines of metrics.jsonl, also of steps that this start repeats.
        """
        self._warn = warn
        self._written: dict[int, set[str]] = {}  # names of values in `earlier`, by step
        for line in earlier:
            self._written.setdefault(line["step"], set()).update(line)
        self._trackers: dict[str, Tracker] = {}
        for name in config.log.tracker_names:
            with self._dropping(name):
                self._trackers[name] = _TRACKERS[name](config, run_dir, step)
        for line in (each for each in earlier if each["step"] <= step):
            self.log_line(line)

    def log_line(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics.jsonl to the trackers."""
        step = line["step"]
        values = {
            name: value
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        repeated = self._written.get(step, set()) & values.keys()
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                stored = {x for x in repeated if tracker.is_stored(step, x)}
                if new := {x: value for x, value in values.items() if x not in stored}:
                    tracker.log(step, new)

    def close(self, *, succeeded: bool) -> None:
        """Send the remaining values for a limited time, which is shorter if the run failed."""
        patience = _CLOSE_SECONDS if succeeded else _FAILED_CLOSE_SECONDS
        for name, each in list(self._trackers.items()):
            thread = threading.Thread(target=self._close, args=(name, each, succeeded), daemon=True)
            thread.start()
            thread.join(patience)
            if thread.is_alive():
                problem = f"not closed within {patience:g} s, values may be missing"
                self._warn(f"log.trackers={name}: {problem}")
        self._trackers.clear()

    def _close(self, name: str, tracker: Tracker, succeeded: bool) -> None:
        with self._dropping(name):
            tracker.close(succeeded=succeeded)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            text = install_hint(name, error) if isinstance(error, ImportError) else str(error)
            cause = " ".join(text.split())[:_MAX_MESSAGE] or type(error).__name__
            self._warn(f"log.trackers={name}: {cause}; the run continues without it")


def _project(config: Config, variable: str) -> str:
    return config.log.project or os.environ.get(variable) or "fsdpctl"


def _tracker_id(run_dir: Path) -> str:
    path = run_dir / TRACKER_ID
    if not path.exists():
        files.write_atomic(path, f"{secrets.token_hex(4)}\n")
    return checked_name(read_text_file(path).strip(), _ID, str(path), UsageError)


def _next_wandb_step(logs: Sequence[Path]) -> int:
    """Return one more than the last step in the logs of earlier starts without a server.

    If wandb did not close a log, its size is a multiple of a block, and its last step may be cut.
    """
    counts = [0]
    for log in logs:
        with open(open_regular(log), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8 * _BLOCK))
            # An item in protobuf: the key _step, then its JSON value.
            steps = re.findall(rb"_step\x82\x01[\x01-\x14](\d+)", file.read())
        counts += [int(each) + (size % _BLOCK > 0) for each in steps]
    return max(counts)


def _mlflow_name(name: str) -> str:
    """Return a name without characters that MLflow rejects, such as those in names of sources."""
    return re.sub(r"[^\w./ -]", "_", name)
