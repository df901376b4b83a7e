"""Other tools that are told the figures of a run: TensorBoard, Weights & Biases."""

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import words_for_others
from fsdpctl.errors import UsageError
from fsdpctl.io.files import plain_name, read_text_file
from fsdpctl.run.files import TENSORBOARD, WANDB_ID, replace_text

_LEAVING_SECONDS, _FAILING_SECONDS = 60.0, 5.0  # for what is still to be sent
_FLUSH_SECONDS = 10  # so much a run that is killed may lose
_ID = r"[a-z0-9]{1,64}"
_LONGEST = 300  # characters of a message


class Logger(Protocol):
    """One of them."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """These are the figures of a step; names come again at other steps."""
        ...

    def cut_back(self, step: int) -> None:
        """What came of later steps is to be forgotten."""
        ...

    def close(self, *, well: bool) -> None:
        """There are no more, as the run ended `well` or not; may take long."""
        ...


class Loggers:
    """All that the configuration asks for. One that fails is let go of; the run goes on."""

    def __init__(
        self, config: Config, run_dir: Path, step: int, warn: Callable[[str], None]
    ) -> None:
        """Begin.

        Args:
            config: of the run.
            run_dir: where they keep what they write.
            step: what they have of later steps is of before a resume, and to be forgotten.
            warn: is told of one that fails, in a line.
        """
        self._warn = warn
        self._loggers: dict[str, Logger] = {}
        if config.log.tensorboard:
            self._begin("tensorboard", lambda: _TensorBoard(run_dir, step))
        if config.log.wandb:
            self._begin("wandb", lambda: _Wandb(config, run_dir))

    def _begin(self, name: str, make: Callable[[], Logger]) -> None:
        try:
            self._loggers[name] = make()
        except Exception as error:
            self._let_go(name, error)

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl; they are told the numbers in it."""
        figures = {
            name: value
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if figures:
            self._tell(lambda each: each.log(line["step"], figures))

    def cut_back(self, step: int) -> None:
        """What they were told of later steps is to be forgotten."""
        self._tell(lambda each: each.cut_back(step))

    def _tell(self, tell: Callable[[Logger], None]) -> None:
        for name, each in list(self._loggers.items()):
            try:
                tell(each)
            except Exception as error:
                self._let_go(name, error)

    def close(self, *, well: bool = True) -> None:
        """Let them write and send what they still have, for a bounded time.

        `well`: whether the run ended well; if not, its error waits to be heard of.
        """
        patience = _LEAVING_SECONDS if well else _FAILING_SECONDS
        for name, each in list(self._loggers.items()):
            thread = threading.Thread(target=self._close, args=(name, each, well), daemon=True)
            thread.start()
            thread.join(patience)
            if thread.is_alive():
                self._warn(f"log.{name}: not done after {patience:g} s; left so")
        self._loggers.clear()

    def _close(self, name: str, logger: Logger, well: bool) -> None:
        try:
            logger.close(well=well)
        except Exception as error:
            self._let_go(name, error)

    def _let_go(self, name: str, error: Exception) -> None:
        self._loggers.pop(name, None)
        said = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
        self._warn(f"log.{name}: {said}; the run goes on without it")


class _TensorBoard:
    """Event files below the run's directory."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self._folder = str(run_dir / TENSORBOARD)
        self._writer = self._begin(step)

    def _begin(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, purge_step=step + 1, flush_secs=_FLUSH_SECONDS)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a point of each curve."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def cut_back(self, step: int) -> None:
        """Begin another file, which says from where on it takes the place of those before."""
        self._writer.close()
        self._writer = self._begin(step)

    def close(self, *, well: bool) -> None:
        """Write what is left."""
        self._writer.close()


class _Wandb:
    """One run there for all starts of one here, by an id that lies in the run's directory."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        project = config.log.wandb_project or os.environ.get("WANDB_PROJECT") or "fsdpctl"
        self._run = wandb.init(
            id=_wandb_id(run_dir),
            resume="allow",
            project=project,
            name=run_dir.name,
            dir=str(run_dir),
            config=words_for_others(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Not by the order of arrival: after a resume, steps come a second time.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send a point of each curve."""
        self._run.log({"step": step, **figures})

    def cut_back(self, step: int) -> None:
        """What was sent was sent: the later points of a step are drawn over it."""

    def close(self, *, well: bool) -> None:
        """Send what is left."""
        self._run.finish(exit_code=0 if well else 1)


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / WANDB_ID
    if not path.exists():
        replace_text(path, f"{secrets.token_hex(4)}\n")
    return plain_name(read_text_file(path, 256).strip(), _ID, str(path), UsageError)
