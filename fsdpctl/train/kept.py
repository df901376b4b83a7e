"""What a living run keeps in its directory: noticed when it goes, and put back."""

import time
from pathlib import Path

from fsdpctl.config.model_path import RUN_CONFIG
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_to_yaml
from fsdpctl.errors import FsdpctlError
from fsdpctl.run.assets import read_run_assets, write_assets
from fsdpctl.run.files import ENVIRONMENT, LOGS, OVERRIDES, WANDB_ID
from fsdpctl.run.metrics import MetricsFile

_TEXTS = (OVERRIDES, ENVIRONMENT, WANDB_ID)  # those that there are
_LOOKS_EVERY = 1.0  # seconds: a file system of a cluster is asked for it


class KeptFiles:
    """The configuration, figures and assets of a run, as this rank knows them."""

    def __init__(self, config: Config, run_dir: Path, metrics: MetricsFile | None) -> None:
        """Of a run that has begun; `metrics` is rank 0's, which puts everything back."""
        self._config = config
        self._run_dir = run_dir
        self._metrics = metrics
        self._assets = {} if metrics is None else read_run_assets(run_dir)
        self._texts = {}
        if metrics is not None:
            self._texts = {name: _text_of(run_dir / name) for name in _TEXTS}
        self._looked = time.monotonic()
        self.are_lost = False

    def look(self, *, now: bool = False) -> bool:
        """Whether somebody has deleted or moved them. Looks once a second, or `now`."""
        if not self.are_lost and (now or time.monotonic() - self._looked >= _LOOKS_EVERY):
            self._looked = time.monotonic()
            self.are_lost = not (self._run_dir / RUN_CONFIG).exists() or (
                self._metrics is not None and not self._metrics.is_in_place
            )
        return self.are_lost

    def put_back(self) -> None:
        """Write everything but checkpoints anew, where it was.

        Raises:
            FsdpctlError: it cannot be written.
        """
        if self._metrics is None:
            return
        try:
            (self._run_dir / LOGS).mkdir(parents=True, exist_ok=True)
            write_assets(self._run_dir, self._assets)
            for name, text in self._texts.items():
                if text:
                    (self._run_dir / name).write_text(text, encoding="utf-8")
            self._metrics.put_back()
            (self._run_dir / RUN_CONFIG).write_text(config_to_yaml(self._config), encoding="utf-8")
        except OSError as error:
            raise FsdpctlError(
                f"{self._run_dir}: was deleted or moved while the run used it, and cannot be "
                f"written again: {error.strerror}"
            ) from None

    def as_error(self, step: int) -> FsdpctlError:
        """What is to be raised once the state after `step` was saved again."""
        return FsdpctlError(
            f"{self._run_dir}: was deleted or moved while the run used it; step {step} and all "
            "figures were saved there again, older checkpoints were not"
        )


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
