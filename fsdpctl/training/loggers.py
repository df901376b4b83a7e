"""Experiment loggers: TensorBoard and Weights & Biases."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_words
from fsdpctl.errors import UsageError
from fsdpctl.io.files import plain_name, read_text_file, replace
from fsdpctl.io.packages import lacking
from fsdpctl.io.run_files import TENSORBOARD, WANDB_ID

_LEAVING_SECONDS, _FAILING_SECONDS = 60.0, 5.0  # to send the remaining values
_FLUSH_SECONDS = 10  # a killed run may lose the values of this time
_ID = r"[a-z0-9]{1,64}"
_LONGEST = 300  # characters of a message


class _TensorBoard:
    """An experiment logger that writes event files into the run directory."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run_dir / TENSORBOARD)
        self._writer = SummaryWriter(folder, purge_step=step + 1, flush_secs=_FLUSH_SECONDS)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, well: bool) -> None:
        """Write the remaining values, which may take long; `well`: the run did not fail."""
        self._writer.close()


class _Wandb:
    """An experiment logger with one W&B run for all starts, by an id in the run directory."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        project = config.log.wandb_project or os.environ.get("WANDB_PROJECT") or "fsdpctl"
        self._run = wandb.init(
            id=_wandb_id(run_dir),
            resume="allow",
            project=project,
            name=run_dir.name,
            dir=str(run_dir),
            config=config_words(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Not in order of arrival: after a resume, steps come a second time.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self, *, well: bool) -> None:
        self._run.finish(exit_code=0 if well else 1)


Logger = _TensorBoard | _Wandb


class Loggers:
    """The configured experiment loggers. One that fails is dropped, and the run continues."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        step: int,
        warn: Callable[[str], None],
        *,
        is_on: bool = True,
    ) -> None:
        """Start the loggers after `step`; `warn` gets a message about each that fails."""
        self._warn = warn
        self._loggers: dict[str, Logger] = {}
        if is_on and config.log.tensorboard:
            with self._dropping("tensorboard"):
                self._loggers["tensorboard"] = _TensorBoard(run_dir, step)
        if is_on and config.log.wandb:
            with self._dropping("wandb"):
                self._loggers["wandb"] = _Wandb(config, run_dir)

    def line(self, line: Mapping[str, Any]) -> None:
        figures = {
            name: value
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if figures:
            for name, each in list(self._loggers.items()):
                with self._dropping(name):
                    each.log(line["step"], figures)

    def close(self, *, well: bool) -> None:
        """Send the remaining values for a limited time, shorter if an error is to be reported."""
        patience = _LEAVING_SECONDS if well else _FAILING_SECONDS
        for name, each in list(self._loggers.items()):
            thread = threading.Thread(target=self._close, args=(name, each, well), daemon=True)
            thread.start()
            thread.join(patience)
            if thread.is_alive():
                self._warn(f"log.{name}: not closed within {patience:g} s, values may be missing")
        self._loggers.clear()

    def _close(self, name: str, logger: Logger, well: bool) -> None:
        with self._dropping(name):
            logger.close(well=well)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._loggers.pop(name, None)
            text = lacking(name, error) if isinstance(error, ImportError) else str(error)
            cause = " ".join(text.split())[:_LONGEST] or type(error).__name__
            self._warn(f"log.{name}: {cause}; the run continues without it")


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / WANDB_ID
    if not path.exists():
        replace(path, f"{secrets.token_hex(4)}\n")
    return plain_name(read_text_file(path).strip(), _ID, str(path), UsageError)
